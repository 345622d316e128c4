"""Where LibreYOLO's forwards are cut, for whoever runs its wrappers with our runtime: ``seam_of(wrapper).bind(wrapper)``.

The pieces are those that the library's own runners capture (``_get_graph_runner`` of each wrapper).
"""

from __future__ import annotations

from typing import Any

from parity.runtime import Seam

DEPTH_ANYTHING_3 = Seam(
    ("model.forward_network",),
    eager="the sky step, which counts pixels on the host and branches on the count",
)
BIREFNET = Seam(
    ("model.forward_enc",),
    eager="the decoder, whose deform_conv2d launches its kernel on a stream of its own and so is missing from a graph",
)
PP_OCR = Seam(
    ("model.det",),
    eager="the recognition, whose crops have a width per line; of the detection one graph per input shape, eight at most",
)
SAM = Seam(
    ("model.get_image_embeddings",),
    eager="the prompts and the mask decoder, run many times per image and cheap",
)
SENSENOVA = Seam(
    ("model.run_vit.tower",),
    eager="the generation, token by token over a growing cache",
)
PICOSAM3 = Seam(("model",), eager="the prompts")
WHOLE = Seam(("_forward",), eager="preprocessing and postprocessing")

_SEAMS = {
    "depth_anything3": DEPTH_ANYTHING_3,
    "birefnet": BIREFNET,
    "feynobg": BIREFNET,
    "ppocr": PP_OCR,
    "sam": SAM,
    "sam2": SAM,
    "sam3": SAM,
    "edgetam": SAM,
    "mobilesam": SAM,
    "picosam3": PICOSAM3,
    "sensenovavision": SENSENOVA,
}


class PackedTower:
    """SenseNova's ``run_vit``, with the packing among the arguments of the tower.

    The tower reads on the host where each image of a packed sequence begins (siglip_navit.py, ``_segment_bounds``), so a graph of one
    packing is wrong for every other of the same shapes. Where the library's own graphs are in use, its own ``run_vit`` is called.
    """

    def __init__(self, model: Any) -> None:
        self.vision, self.model = model.vit_model, model

    def __call__(self, tokens: Any, position_ids: Any, cu_seqlens: Any, max_seqlen: Any) -> Any:
        if getattr(self.model, "_vit_graph_runner", None) is not None:
            return type(self.model).run_vit(self.model, tokens, position_ids, cu_seqlens, max_seqlen)
        return self.tower(tokens, position_ids, cu_seqlens, int(max_seqlen), tuple(cu_seqlens.tolist()))

    def tower(self, tokens: Any, position_ids: Any, cu_seqlens: Any, max_seqlen: int, packing: tuple[int, ...]) -> Any:
        return self.vision(
            packed_pixel_values=tokens,
            packed_flattened_position_ids=position_ids,
            cu_seqlens=cu_seqlens,
            max_seqlen=max_seqlen,
        )


def seam_of(wrapper: Any) -> Seam:
    """The seam of a LibreYOLO wrapper; its paths start at the wrapper. The whole forward where the library has no seam.

    Bind it again after ``wrapper.model`` was replaced. A SenseNova model gets a ``run_vit`` of ours, a PackedTower.
    """
    found = _SEAMS.get(wrapper.FAMILY, WHOLE)
    if found is SENSENOVA and not isinstance(wrapper.model.run_vit, PackedTower):
        wrapper.model.run_vit = PackedTower(wrapper.model)
    return found
