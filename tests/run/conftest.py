"""What every test of the run room needs: a folder for the fake judges, and proof that nothing is left."""

import tempfile

import pytest
from leftovers import processes_with, wait_until


def _told(folder, patch):
    temporary = folder / "tmp"
    temporary.mkdir()
    patch.setattr(tempfile, "tempdir", str(temporary))
    patch.setenv("TMPDIR", str(temporary))
    patch.setenv("FAKE_JUDGES_FOLDER", str(folder))
    yield folder
    mark = f"FAKE_JUDGES_FOLDER={folder}"
    wait_until(lambda: not processes_with(mark), f"{mark}: processes were left", 3)
    assert not list(temporary.glob("parity-*")), "logs were left"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where fake judges leave marks. Afterwards every process that was told of it must be gone."""
    yield from _told(tmp_path, monkeypatch)


@pytest.fixture(scope="module")
def shared_folder(tmp_path_factory):
    """The same for all tests of a module."""
    with pytest.MonkeyPatch.context() as patch:
        yield from _told(tmp_path_factory.mktemp("shared"), patch)
