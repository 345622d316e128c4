"""Finding families: what is wrong with a file is said with its name, and a name that nothing answers to lists near ones."""

from __future__ import annotations

import importlib.metadata
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from parity.rows.discovery import Catalogue, DiscoveryError, Selection, discover
from parity.rows.family import Expect, Family, Zoo
from parity.rows.row import Row
from parity.rows.training import Training

FILE = """
from parity.rows.family import Family, Zoo

def _never(*_):
    raise AssertionError("discovery builds nothing")

ZOO = Zoo({name!r}, "json", "pip install {name}", ({families}), _never, _never)
"""


def write(path: Path, *families: str, name: str = "") -> Path:
    """A family file declaring ``families`` of the task detect."""
    told = "".join(f"Family({name or path.stem!r}, {f!r}, 'detect', _never, _never)," for f in families)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(FILE.format(name=name or path.stem, families=told))
    return path


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    """Family modules are found anew by every test."""
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.split(".")[0] in ("zoos", "families", "others"):
            del sys.modules[name]


@pytest.fixture
def zoos(tmp_path: Path) -> Path:
    return tmp_path / "zoos"


# ---- files


def test_files_and_packages_are_found_in_order_and_private_ones_are_not(zoos: Path) -> None:
    write(zoos / "zebra.py", "a")
    write(zoos / "ant" / "__init__.py", "b", name="ant")
    (zoos / "_helper.py").write_text("raise RuntimeError")
    (zoos / ".hidden.py").write_text("raise RuntimeError")
    (zoos / "data").mkdir()
    (zoos / "README.md").write_text("")
    found = discover([zoos])
    assert [z.name for z in found.zoos] == ["ant", "zebra"]
    assert found.sources == (str(zoos),)


def test_a_package_may_import_its_own_parts(zoos: Path) -> None:
    write(zoos / "ant" / "__init__.py", "b", name="ant")
    (zoos / "ant" / "names.py").write_text("NAME = 'ant'")
    with (zoos / "ant" / "__init__.py").open("a") as file:
        file.write("from .names import NAME\nassert NAME == ZOO.name\n")
    assert [z.name for z in discover([zoos]).zoos] == ["ant"]


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("import no_such", "ModuleNotFoundError"),
        ("x = (", "SyntaxError"),
        ("raise SystemExit(3)", "SystemExit: 3"),
    ],
)
def test_a_broken_file_is_named_with_its_error(zoos: Path, text: str, error: str) -> None:
    write(zoos / "fine.py", "a")
    (zoos / "rotten.py").write_text(text)
    for _ in range(2):  # a broken module may not be found in sys.modules the second time
        with pytest.raises(DiscoveryError, match=rf"zoos/rotten\.py: raised {error}"):
            discover([zoos])


@pytest.mark.parametrize(("text", "found"), [("", "NoneType"), ("ZOO = 'a name'", "str")])
def test_a_file_without_a_zoo(zoos: Path, text: str, found: str) -> None:
    (write(zoos / "fine.py", "a").parent / "empty.py").write_text(text)
    with pytest.raises(DiscoveryError, match=rf"zoos/empty\.py: declares no ZOO .*parity\.rows\.family\.Zoo\); found {found}"):
        discover([zoos])


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(DiscoveryError, match="nowhere: no such folder of families"):
        discover([tmp_path / "nowhere"])


def test_two_zoos_of_one_name(zoos: Path) -> None:
    write(zoos / "one.py", "a", name="same")
    write(zoos / "two.py", "b", name="same")
    with pytest.raises(DiscoveryError, match="declared twice: zoo same"):
        discover([zoos])


def test_two_families_of_one_name(zoos: Path) -> None:
    write(zoos / "one.py", "a", "b", "a")
    with pytest.raises(DiscoveryError, match="declared twice: family one/a/detect"):
        discover([zoos])


def test_two_folders_of_one_name_are_not_mixed_up(tmp_path: Path) -> None:
    here, there = tmp_path / "here" / "zoos", tmp_path / "there" / "zoos"
    write(here / "one.py", "a")
    write(there / "one.py", "b")
    assert [f.name for f in discover([here]).zoos[0].families] == ["a"]
    with pytest.raises(DiscoveryError, match=r"there/zoos/one\.py: a module zoos\.one is loaded already, from .*here/zoos/one\.py"):
        discover([there])


def test_entry_points_are_asked_and_named(zoos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(zoos / "one.py", "a")
    (zoos / "empty.py").write_text("")
    (zoos / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(zoos.parent))
    points = [importlib.metadata.EntryPoint("mine", "zoos.one", "parity.families")]
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: points if group == "parity.families" else [])
    found = discover(["entry-points"])
    assert [z.name for z in found.zoos] == ["one"]
    assert found.sources == ("entry-points",)
    points.append(importlib.metadata.EntryPoint("other", "zoos.empty:ZOO", "parity.families"))
    with pytest.raises(DiscoveryError, match="entry point other: declares no ZOO"):
        discover(["entry-points"])


# ---- selections


def _never(*_: Any) -> Any:
    raise AssertionError("selecting builds nothing")


def _family(zoo: str, name: str, task: str = "detect", **more: Any) -> Family:
    return Family(zoo, name, task, _never, _never, **{"sizes": (64, 640), "arms": ("bare", "graphed"), **more})


@pytest.fixture
def catalogue() -> Catalogue:
    native = _family("one", "yolox", arms=("bare", "native"), expected={"native": (Expect("wrong", "its own path is broken"),)})
    one = (_family("one", "ec"), _family("one", "ec", "pose"), native, _family("one", "dec", boundaries=("", "whole")))
    return Catalogue((Zoo("one", "json", "", one, _never, _never), Zoo("two", "json", "", (_family("two", "ec"),), _never, _never)), ())


def ids(rows: list[Row]) -> list[str]:
    return [row.id for row in rows]


def test_everything_at_recommended_sizes_by_default(catalogue: Catalogue) -> None:
    rows = catalogue.select(Selection())
    assert len(rows) == 2 * 5 + 2  # dec has another boundary
    assert {r.settings.size for r in rows} == {64}
    assert {r.arm for r in rows} == {"bare", "graphed", "native"}


def test_names_are_exact(catalogue: Catalogue) -> None:
    """A substring, as of pytest's -k, would take every 'detect' with 'ec', and 'dec' too."""
    rows = catalogue.select(Selection(families=("ec",)))
    assert {(r.zoo, r.family, r.task) for r in rows} == {("one", "ec", "detect"), ("one", "ec", "pose"), ("two", "ec", "detect")}
    assert ids(catalogue.select(Selection(("two",), ("ec",), arms=("bare",)))) == ["two/ec/detect/inference/64px-b1-float32/bare"]


@pytest.mark.parametrize(
    ("selection", "count"),
    [
        (Selection(tasks=("pose",)), 2),
        (Selection(families=("ec", "yolox"), zoos=("one",)), 6),
        (Selection(arms=("native",)), 1),
        (Selection(arms=("eager",)), 6),
        (Selection(families=("yolox",), size="all"), 4),
        (Selection(families=("yolox",), size="native"), 2),
        (Selection(families=("yolox",), size="640"), 2),
        (Selection(boundary="whole"), 2),
        (Selection(families=("dec",), boundary=""), 2),
        (Selection(modes=("inference",)), 12),
    ],
)
def test_conditions_narrow(catalogue: Catalogue, selection: Selection, count: int) -> None:
    rows = catalogue.select(selection)
    assert len(rows) == len(set(rows)) == count


@pytest.mark.parametrize(
    ("selection", "message"),
    [
        (Selection(("on",)), "no zoo is called 'on'; near: one"),
        (Selection(families=("yoloxx",)), "no family is called 'yoloxx'; near: yolox"),
        (Selection(families=("ec", "nothing-like-it")), "no family is called 'nothing-like-it'; near: dec, ec, yolox"),
        (Selection(tasks=("pos",)), "no task is called 'pos'; near: pose"),
        (Selection(modes=("train",)), "no mode is called 'train'; near: training"),
        (Selection(arms=("graph",)), "no arm is called 'graph'; near: graphed"),
        (Selection(size="large"), "no size is called 'large'; near: "),
    ],
)
def test_unknown_names_list_near_ones(catalogue: Catalogue, selection: Selection, message: str) -> None:
    with pytest.raises(DiscoveryError, match=message):
        catalogue.select(selection)


@pytest.mark.parametrize(
    ("selection", "told"),
    [
        (Selection(("two",), ("yolox",)), "--zoo two --family yolox --size recommended; --zoo could be one, or --family could be ec;"),
        (Selection(size="320"), "--size 320; --size could be 64, 640;"),
        (Selection(modes=("training",)), "--mode training --size recommended; --mode could be inference;"),
        (Selection(("two",), arms=("native",)), "--zoo two --arm native --size recommended; "),
        (Selection(boundary="neck"), "--size recommended --boundary neck; --boundary could be '', whole;"),
        (
            Selection(("two",), ("yolox",), modes=("training",)),
            "--zoo two --family yolox --mode training --size recommended; name fewer",
        ),
    ],
)
def test_an_empty_selection_is_an_error_that_names_what_stands_in_the_way(
    catalogue: Catalogue, selection: Selection, told: str
) -> None:
    with pytest.raises(DiscoveryError) as caught:
        catalogue.select(selection)
    assert str(caught.value).startswith(f"no row answers to {told}")
    assert str(caught.value).endswith("; see `parity list`")


def test_of_many_that_would_answer_the_first_are_named() -> None:
    families = tuple(Family("wide", f"f{n}", task, _never, _never) for n, task in enumerate("aaaaaaaaaab"))
    wide = Zoo("wide", "json", "", families, _never, _never)
    with pytest.raises(DiscoveryError, match=r"--family could be f0, f1, f2, f3, f4, f5, f6, f7 and 2 more, or --task could be b;"):
        Catalogue((wide,), ()).select(Selection(families=("f10",), tasks=("a",)))


def test_the_family_of_a_row(catalogue: Catalogue) -> None:
    for row in catalogue.select(Selection()):
        assert catalogue.family(row).key == f"{row.zoo}/{row.family}/{row.task}"
    with pytest.raises(DiscoveryError, match=r"no family of mode inference is called 'one/yolo/detect'; near: one/yolox/detect"):
        catalogue.family(Row("one", "yolo", "detect"))
    with pytest.raises(DiscoveryError, match="no zoo is called 'three'"):
        catalogue.family(Row("three", "yolox", "detect"))


# ---- training


@pytest.fixture
def both() -> Catalogue:
    """Families that are declared for inference and for training, one for training alone."""
    declared = (
        _family("one", "yolox"),
        Training("one", "yolox", "detect", _never, _never, size=64),
        Training("one", "fomo", "point", _never, _never, size=96, arms=("graphed",), dtypes=("float16", "float32")),
    )
    return Catalogue((Zoo("one", "json", "", declared, _never, _never),), ())


@pytest.mark.parametrize(
    ("selection", "count"),
    [
        (Selection(), 2 + 6 + 2),
        (Selection(modes=("training",)), 8),
        (Selection(modes=("inference",)), 2),
        (Selection(modes=("training", "inference")), 10),
        (Selection(dtypes=("float16",)), 3),
        (Selection(dtypes=("float32",)), 2 + 2 + 1),
        (Selection(dtypes=("bfloat16", "float16"), families=("fomo",)), 1),
        (Selection(modes=("training",), dtypes=("bfloat16",), arms=("native",)), 1),
        (Selection(modes=("training",), size="native"), 8),
        (Selection(modes=("training",), size="all"), 8),
        (Selection(size="96"), 2),
        (Selection(families=("yolox",), size="native"), 2 + 6),
        (Selection(modes=("training",), arms=("eager",)), 3 + 2),
        (Selection(boundary="", modes=("training",)), 8),
    ],
)
def test_modes_and_dtypes_narrow(both: Catalogue, selection: Selection, count: int) -> None:
    rows = both.select(selection)
    assert len(rows) == len(set(rows)) == count
    assert {r.mode for r in rows} <= set(selection.modes or ("inference", "training"))
    assert {r.settings.dtype for r in rows} <= set(selection.dtypes or ("float16", "bfloat16", "float32"))


def test_an_unknown_dtype_lists_near_ones_and_one_that_no_row_has_is_an_empty_selection(both: Catalogue) -> None:
    with pytest.raises(DiscoveryError, match="no dtype is called 'fp16'; near: "):
        both.select(Selection(dtypes=("fp16",)))
    with pytest.raises(DiscoveryError, match="no dtype is called 'float8'; near: float32, float16, bfloat16"):
        both.select(Selection(dtypes=("float8",)))
    with pytest.raises(DiscoveryError, match="no row answers to"):
        both.select(Selection(families=("fomo",), dtypes=("bfloat16",)))


def test_what_declares_a_row_is_found_by_its_mode(both: Catalogue) -> None:
    for row in both.select(Selection()):
        found = both.declaration(row)
        assert (found.key, found.mode) == (f"{row.zoo}/{row.family}/{row.task}", row.mode)
        named, other = (both.training, both.family) if row.mode == "training" else (both.family, both.training)
        assert named(row) == found
        with pytest.raises(DiscoveryError, match=rf"{row.id}: a row of mode {row.mode}, where one of "):
            other(row)
    with pytest.raises(DiscoveryError, match=r"no family of mode inference is called 'one/fomo/point'; near: one/yolox/detect"):
        both.declaration(Row("one", "fomo", "point"))


def test_a_family_may_be_declared_once_per_mode(zoos: Path) -> None:
    text = FILE.format(name="one", families="Family('one', 'a', 'detect', _never, _never), {}")
    zoos.mkdir()
    more = "from parity.rows.training import Training\n"
    one = "Training('one', 'a', 'detect', _never, _never),"
    (zoos / "one.py").write_text(more + text.format(one))
    assert [(f.key, f.mode) for f in discover([zoos]).zoos[0].families] == [
        ("one/a/detect", "inference"),
        ("one/a/detect", "training"),
    ]
    del sys.modules["zoos.one"]
    (zoos / "one.py").write_text(more + text.format(one * 2))
    with pytest.raises(DiscoveryError, match=r"declared twice: family one/a/detect \(training\)"):
        discover([zoos])


def test_a_catalogue_of_nothing() -> None:
    with pytest.raises(DiscoveryError, match="no zoo is called 'one'; near: there is none at all"):
        Catalogue((), ()).zoo("one")


def test_a_folder_goes_before_what_is_announced_under_its_name(zoos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def explode(name: str) -> None:
        raise AssertionError(f"{name} was imported though a folder declares its zoo")

    write(zoos / "ant.py", "a")
    names = [zoo.name for zoo in discover([zoos]).zoos]
    points = [importlib.metadata.EntryPoint(names[0], "somewhere.else", "parity.families")]
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: points)
    monkeypatch.setattr(importlib, "import_module", explode)
    assert [zoo.name for zoo in discover([zoos, "entry-points"]).zoos] == names
    with pytest.raises(DiscoveryError, match=r"entry point .* = somewhere.else: raised AssertionError.*uninstall or mend"):
        discover(["entry-points"])


def test_one_announced_zoo_can_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    points = [importlib.metadata.EntryPoint(name, f"package.{name}", "parity.families") for name in ("controls", "other")]
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: points)
    monkeypatch.setattr(importlib, "import_module", lambda name: asked.append(name) or types.SimpleNamespace(ZOO=None))
    with pytest.raises(DiscoveryError, match="entry point controls: declares no ZOO"):
        discover(["entry-points:controls"])
    assert asked == ["package.controls"]
