"""Models of zoos that cannot be captured: cause and line are those that their source shows, and the cure that is proposed cures them.

Small settings of the same classes, so that the same lines run. A cure changes one idea of a function's text, which must be there.
Each takes some seconds: leave them out with ``-k "not test_explain_models"``.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from parity.judge import inference
from parity.judge.explain.study import study, study_training
from parity.judge.inference import judge
from parity.judge.subject import Bench
from parity.judge.train.step import TrainBench
from parity.judge.verdict import Verdict, verdict_of
from parity.record.advice import advise
from parity.rows.discovery import Catalogue, discover
from parity.rows.family import Input, Subject
from parity.rows.row import Row
from parity.runtime.engine import engine

from .judging import ENGINE, catalogue_of, subject

pytestmark = [
    pytest.mark.usefixtures("fresh"),
    *(
        pytest.mark.filterwarnings(f"ignore::{kind}") for kind in ("DeprecationWarning", "FutureWarning", "UserWarning")
    ),  # the zoos' own
]
ROOT = Path(__file__).parents[2]


def line_of(function: Any, text: str) -> str:
    """``file.py:line text``, read from the source."""
    function = inspect.unwrap(function)
    lines, first = inspect.getsourcelines(function)
    number = next(n for n, line in enumerate(lines) if text in line)
    return f"{Path(inspect.getsourcefile(function) or '').name}:{first + number} {lines[number].strip()}"


@contextmanager
def cured(owner: Any, name: str, *changes: tuple[str, str]) -> Iterator[None]:
    """``owner.name`` with its text changed."""
    function = getattr(owner, name)
    text = textwrap.dedent(inspect.getsource(function))
    for old, new in changes:
        assert old in text, f"{name} has no {old!r} any more"
        text = text.replace(old, new)
    plain = inspect.unwrap(function)
    made: dict[str, Any] = {}
    exec(compile(text, inspect.getsourcefile(plain) or "", "exec"), plain.__globals__, made)
    setattr(owner, name, made[name])
    try:
        yield
    finally:
        setattr(owner, name, function)


def learned(catalogue: Catalogue, row: Row) -> dict[str, Any]:
    bench = Bench(row, catalogue.family(row), engine(ENGINE), 0)
    with bench.engine.entered(), torch.no_grad():
        return study(bench)


def small(build: Callable[[], nn.Module], *shape: int) -> tuple[Catalogue, Row]:
    catalogue = catalogue_of(lambda settings: subject(build()), lambda size, batch: (Input((batch, *shape)),))
    return catalogue, Row("zoo", "family", "task", arm="bare")


def judged(catalogue: Catalogue, row: Row) -> Verdict:
    inference._MEMORY.subject = ""  # the same row, of another model
    return verdict_of(judge(row, catalogue, ENGINE), ENGINE)


def told(found: dict[str, Any]) -> set[tuple[str, str]]:
    return {(r["cause"], short(r["where"])) for r in found["reasons"]}


def short(where: str) -> str:
    """Without the file's folders."""
    file, _, code = where.partition(" ")
    return f"{file.rpartition('/')[2]} {code}"


def refused(catalogue: Catalogue, row: Row, cause: str) -> str:
    verdict = judged(catalogue, row)
    assert (verdict.verdict, verdict.cause) == ("uncapturable", cause), verdict
    return short(verdict.where)


def test_mvit() -> None:
    mvit = pytest.importorskip("torchvision.models.video.mvit")
    block = mvit.MSBlockConfig(2, 16, 16, [3, 3, 3], [3, 3, 3], [1, 1, 1], [1, 2, 2])

    def build() -> nn.Module:
        return mvit.MViT((32, 32), 4, [block, block], True, True, True, True, num_classes=5)  # type: ignore[no-any-return]

    catalogue, row = small(build, 3, 4, 32, 32)
    found = learned(catalogue, row)
    lines = [line_of(mvit._add_rel_pos, text) for text in ("Rh = rel_pos_h[", "Rw = rel_pos_w[", "Rt = rel_pos_t[")]
    assert told(found) == {("h2d-copy", line) for line in lines}
    assert {r["module"] for r in found["reasons"]} == {"blocks.0.attn"}
    assert "device=x.device" in advise("h2d-copy", found["reasons"][0]["what"])
    assert refused(catalogue, row, "h2d-copy") == lines[0]
    sizes = [f"torch.arange({q}_{axis})" for q in "qk" for axis in "thw"]
    with cured(mvit, "_add_rel_pos", *((size, size.replace(")", ", device=q.device)")) for size in sizes)):
        assert judged(catalogue, row).safe


def test_raft_small() -> None:
    raft = pytest.importorskip("torchvision.models.optical_flow.raft")
    catalogue = catalogue_of(
        lambda settings: subject(raft.raft_small(weights=None)),
        lambda size, batch: (Input((batch, 3, 128, 128), -1.0), Input((batch, 3, 128, 128), -1.0)),
        other_batch=None,
    )
    row = Row("zoo", "family", "task", arm="bare")
    found = learned(catalogue, row)
    lines = [
        line_of(raft.RAFT.forward, "coords0 = make_coords_grid("),
        line_of(raft.RAFT.forward, "coords1 = make_coords_grid("),
        line_of(raft.CorrBlock.index_pyramid, "delta = torch.stack("),
    ]
    assert told(found) == {("h2d-copy", line) for line in lines}
    assert {r["module"] for r in found["reasons"]} == {"", "corr_block"}
    assert [p["path"] for p in found["seam"]["pieces"]] == ["feature_encoder", "context_encoder", "update_block"]
    assert found["seam"]["proof"] == "bits equal"
    grid, line = "w // 8).to(fmap1.device)", "neighborhood_side_len)"
    with (
        cured(raft.RAFT, "forward", (grid, "w // 8, device=fmap1.device)")),
        cured(raft.CorrBlock, "index_pyramid", (f"self.radius, {line}", f"self.radius, {line[:-1]}, device=centroids_coords.device)")),
    ):
        assert judged(catalogue, row).safe


def test_ssd300() -> None:
    ssd = pytest.importorskip("torchvision.models.detection.ssd")
    from torchvision.models.detection import _utils, anchor_utils, transform

    def build() -> nn.Module:
        return ssd.ssd300_vgg16(weights=None, weights_backbone=None, num_classes=3, detections_per_img=5)  # type: ignore[no-any-return]

    catalogue = catalogue_of(lambda settings: subject(build()), lambda size, batch: ([Input((3, 300, 300))],), other_batch=None)
    found = learned(catalogue, Row("zoo", "family", "task", arm="bare"))
    expected = {
        ("h2d-copy", line_of(transform.GeneralizedRCNNTransform.normalize, "mean = torch.as_tensor(")),
        ("h2d-copy", line_of(transform.GeneralizedRCNNTransform.normalize, "std = torch.as_tensor(")),
        ("h2d-copy", line_of(anchor_utils.DefaultBoxGenerator.forward, "default_boxes.to(device)")),
        ("h2d-copy", line_of(_utils.BoxCoder.decode_single, "c_to_c_h = torch.tensor(0.5")),
        ("data-dependent-shape", line_of(ssd.SSD.postprocess_detections, "score = score[keep_idxs]")),
        ("data-dependent-shape", line_of(ssd.SSD.postprocess_detections, "box_ops.batched_nms(")),
    }
    assert expected <= told(found)
    assert [p["path"] for p in found["seam"]["pieces"]] == ["backbone", "head"]
    assert found["seam"]["proof"] == "bits equal", "no line cures it: what keeps boxes stays outside"


def test_csatv2() -> None:
    csatv2 = pytest.importorskip("timm.models.csatv2")

    def build() -> nn.Module:
        return csatv2.CSATv2(num_classes=5, dims=(32, 32, 32, 32), depths=(1, 1, 1, 1), transformer_depths=(0, 0, 0, 0))  # type: ignore[no-any-return]

    def with_buffer() -> nn.Module:
        model: Any = build()
        order = model.stem_dct.permutation
        del model.stem_dct.permutation
        model.stem_dct.register_buffer("permutation", torch.tensor(order), persistent=False)
        return model  # type: ignore[no-any-return]

    catalogue, row = small(build, 3, 128, 128)
    found = learned(catalogue, row)
    line = line_of(csatv2.LearnableDct2d.forward, "x = x[:, :, self.permutation]")
    assert told(found) == {("h2d-copy", line)}
    assert found["reasons"][0]["module"] == "stem_dct"
    assert "buffer" in advise("h2d-copy", found["reasons"][0]["what"])
    assert "stages" in {p["path"] for p in found["seam"]["pieces"]}
    assert refused(catalogue, row, "h2d-copy") == line
    assert judged(*small(with_buffer, 3, 128, 128)).safe


def test_edgenext() -> None:
    edgenext = pytest.importorskip("timm.models.edgenext")

    def build() -> nn.Module:
        return edgenext.EdgeNeXt(num_classes=5, dims=(16, 16, 16, 16), depths=(1, 2, 1, 1), heads=(2, 2, 2, 2))  # type: ignore[no-any-return]

    catalogue, row = small(build, 3, 64, 64)
    found = learned(catalogue, row)
    line = line_of(edgenext.PositionalEncodingFourier.forward, "inv_mask = ~torch.zeros(shape)")
    assert told(found) == {("h2d-copy", line)}
    assert found["reasons"][0]["module"].endswith("pos_embd")
    assert refused(catalogue, row, "h2d-copy") == line
    with cured(edgenext.PositionalEncodingFourier, "forward", ("torch.zeros(shape)", "torch.zeros(shape, device=device)")):
        assert judged(catalogue, row).safe


def test_samvit() -> None:
    sam = pytest.importorskip("timm.models.vision_transformer_sam")

    def build() -> nn.Module:
        return sam.VisionTransformerSAM(  # type: ignore[no-any-return]
            img_size=64, embed_dim=32, depth=2, num_heads=2, num_classes=5, use_rel_pos=True, window_size=2,
            global_attn_indexes=(1,), neck_chans=16,
        )  # fmt: skip

    catalogue, row = small(build, 3, 64, 64)
    found = learned(catalogue, row)
    line = line_of(sam.get_rel_pos, "return rel_pos_resized[")
    assert told(found) == {("h2d-copy", line)}
    assert found["reasons"][0]["module"] == "blocks.0.attn"
    assert refused(catalogue, row, "h2d-copy") == line
    change = ("dtype=torch.float32)", "dtype=torch.float32, device=rel_pos.device)")
    with cured(sam, "get_rel_pos", change):
        assert judged(catalogue, row).safe


def test_ppyoloe() -> None:
    nn_module = pytest.importorskip("libreyolo.models.ppyoloe.nn")
    catalogue = discover([ROOT / "families"])
    row = Row.parse("libreyolo/ppyoloe/detect/inference/256px-b1-float32/bare")
    catalogue.zoo("libreyolo").warm()
    found = learned(catalogue, row)
    make = nn_module.generate_anchors_for_grid_cell
    lines = [line_of(make, text) for text in ("torch.cat(anchors).to(", "torch.cat(anchor_points).to(", "torch.cat(stride_tensor).to(")]
    assert told(found) == {("h2d-copy", line) for line in lines}
    assert {r["module"] for r in found["reasons"]} == {"head"}
    assert {"backbone", "neck"} <= {p["path"] for p in found["seam"]["pieces"]}
    assert found["seam"]["proof"] == "bits equal"
    changes = [(f"torch.arange(end={n})", f"torch.arange(end={n}, device=device)") for n in "wh"]
    with cured(nn_module, "generate_anchors_for_grid_cell", *changes, ("stride, dtype=dtype)", "stride, dtype=dtype, device=device)")):
        verdict = judged(catalogue, row)
    assert verdict.safe, verdict


@pytest.mark.parametrize(
    ("row", "path"),
    [
        ("libreyolo/birefnet/matte/inference/128px-b1-float32-whole/bare", "forward_enc"),
        ("libreyolo/depth_anything3/depth/inference/112px-b1-float32-whole/bare", "forward_network"),
    ],
)
def test_the_zoos_own_seams_are_found(row: str, path: str) -> None:
    """Where LibreYOLO's authors cut by hand."""
    pytest.importorskip("libreyolo")
    catalogue = discover([ROOT / "families"])
    catalogue.zoo("libreyolo").warm()
    found = learned(catalogue, Row.parse(row))
    first = max(found["seam"]["pieces"], key=lambda piece: piece["operations"])
    assert (first["path"], found["seam"]["proof"]) == (path, "bits equal")
    assert first["operations"] > 0.6


def test_a_detr_is_split_where_the_zoo_splits_it() -> None:
    """In training: backbone and encoder; the decoder's queries follow the number of targets, and every batch has another."""
    pytest.importorskip("libreyolo")
    catalogue = discover([ROOT / "families"])
    catalogue.zoo("libreyolo").warm()
    row = Row.parse("libreyolo/dfine/detect/training/256px-b2-float32/graphed")
    bench = TrainBench(row, catalogue.training(row), engine(ENGINE), 0)
    with bench.engine.entered():
        found = study_training(bench)
    assert [p["path"] for p in found["seam"]["pieces"]] == ["backbone", "encoder"]
    assert found["reasons"] == [], "what is captured of it is captured by the zoo, too"


def test_of_a_recognition_pipeline_the_stages_are_found() -> None:
    """PP-OCR's form: detection, a look at it on the host, and crops as wide as it says."""
    pytest.importorskip("libreyolo")
    from libreyolo.models.ppocr.model import LibrePPOCR

    def build(settings: Any) -> Subject:
        model = LibrePPOCR(size="t", device="cpu").model.eval()

        def pipeline(x: torch.Tensor) -> Any:
            maps = model.det(x)
            width = 32 * (1 + int(torch.isfinite(x).all()))
            return maps, model.rec(x[..., :48, :width])

        return Subject(model, pipeline)

    catalogue = catalogue_of(build, lambda size, batch: (Input((1, 3, 96, 96)),), other_batch=None)
    found = learned(catalogue, Row("zoo", "family", "task", arm="bare"))
    assert {r["cause"] for r in found["reasons"]} == {"host-sync"}
    assert [p["path"] for p in found["seam"]["pieces"]] == ["det", "rec"]
    assert found["seam"]["proof"] == "bits equal"


def test_of_a_promptable_model_the_image_encoder_is_found() -> None:
    """SAM's form: one image, encoded once; prompts that the host looks at."""
    pytest.importorskip("libreyolo")
    from families.libreyolo.towers import _sam1

    def build(settings: Any) -> Subject:
        model: Any = _sam1(128).eval()

        def pipeline(x: torch.Tensor, point: torch.Tensor) -> Any:
            features = model.get_image_embeddings(x)
            return features * float(point.sum())

        return Subject(model, pipeline)

    catalogue = catalogue_of(build, lambda size, batch: (Input((1, 3, 128, 128)), Input((1, 2))), other_batch=None)
    found = learned(catalogue, Row("zoo", "family", "task", arm="bare"))
    pieces = [p["path"] for p in found["seam"]["pieces"]]
    assert found["seam"]["proof"] == "bits equal"
    relative = [r for r in found["reasons"] if "rel_pos_resized" in r["where"]]
    assert pieces == ["get_image_embeddings"] if not relative else pieces[0].startswith("vision_encoder.")
