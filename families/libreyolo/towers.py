"""The families whose graph covers one stage of a pipeline, reached by a path of its own: PP-OCR, the SAM tier, SenseNova."""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from unittest import mock

from parity.rows.family import Expect, Family, Fixed, Input, Subject
from parity.rows.row import Settings

from .images import BYTES, IMAGENET, SIGNED
from .wrapper import offline, subject_of

if TYPE_CHECKING:
    import torch

_PATCH = 14  # SenseNova's vision tower, in pixels


def _wrapper(module: str, cls: str, size: str, model: Callable[[], torch.nn.Module]) -> Any:
    """The wrapper around ``model()``, its download left out. The model is drawn where the wrapper would load it."""
    wrapper = getattr(importlib.import_module(f"libreyolo.models.{module}"), cls)
    with (
        offline(),
        mock.patch.object(wrapper, "_ensure_weights", return_value=""),
        mock.patch.object(wrapper, "_load_pretrained", side_effect=lambda folder: (model(), None)),
    ):
        return wrapper(size, device="cpu")


def _ppocr(settings: Settings) -> Subject:
    from libreyolo.models.ppocr.model import LibrePPOCR

    wrapper = LibrePPOCR(size="t", device="cpu")
    return subject_of(wrapper, dispatch=wrapper.forward_det)


def _sam1(size: int) -> torch.nn.Module:
    from transformers import SamConfig, SamModel

    if size == 1024:
        return SamModel(SamConfig())
    vision = {
        "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "mlp_dim": 128, "output_channels": 32,
        "image_size": size, "window_size": 4, "global_attn_indexes": [1, 3],
    }  # fmt: skip
    prompt = {"hidden_size": 32, "image_size": size, "image_embedding_size": size // 16}
    decoder = {"hidden_size": 32, "mlp_dim": 64, "num_attention_heads": 4, "iou_head_hidden_dim": 32}
    return SamModel(SamConfig(vision_config=vision, prompt_encoder_config=prompt, mask_decoder_config=decoder))


def _pyramid(grid: int) -> list[list[int]]:
    """Edges of the feature maps behind a grid of patches: four times, twice, once as fine."""
    return [[grid * k, grid * k] for k in (4, 2, 1)]


def _sam2(size: int) -> torch.nn.Module:
    from transformers import Sam2Config, Sam2HieraDetConfig, Sam2Model, Sam2VisionConfig

    if size == 1024:
        return Sam2Model(Sam2Config())
    widths = [16, 32, 64, 128]
    backbone = Sam2HieraDetConfig(
        image_size=[size, size],
        hidden_size=widths[0],
        num_attention_heads=1,
        blocks_per_stage=[1, 1, 2, 1],
        embed_dim_per_stage=widths,
        num_attention_heads_per_stage=[1, 2, 4, 8],
        window_size_per_stage=[8, 4, 8, 4],
        global_attention_blocks=[3],
    )
    vision = Sam2VisionConfig(
        backbone_config=backbone,
        backbone_channel_list=widths[::-1],
        backbone_feature_sizes=_pyramid(size // 16),
    )
    return Sam2Model(Sam2Config(vision_config=vision, prompt_encoder_config={"image_size": size}))


def _sam3(size: int) -> torch.nn.Module:
    from transformers import Sam3TrackerConfig, Sam3TrackerModel, Sam3VisionConfig
    from transformers.models.sam3.configuration_sam3 import Sam3ViTConfig

    if size == 1008:
        return Sam3TrackerModel(Sam3TrackerConfig())
    backbone = Sam3ViTConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        image_size=size,
        pretrain_image_size=size // 2,
        patch_size=14,
        window_size=4,
        global_attn_indexes=[1, 3],
    )
    vision = Sam3VisionConfig(backbone_config=backbone, backbone_feature_sizes=_pyramid(size // 14))
    prompt = {"image_size": size, "patch_size": 14}
    return Sam3TrackerModel(Sam3TrackerConfig(vision_config=vision, prompt_encoder_config=prompt))


def _edgetam(size: int) -> torch.nn.Module:
    from transformers import EdgeTamConfig, EdgeTamModel
    from transformers.models.edgetam.configuration_edgetam import EdgeTamVisionConfig
    from transformers.models.timm_wrapper.configuration_timm_wrapper import TimmWrapperConfig

    features = {"in_chans": 3, "features_only": True, "out_indices": [0, 1, 2, 3]}
    vision = EdgeTamVisionConfig(
        backbone_config=TimmWrapperConfig(architecture="repvit_m1.dist_in1k", model_args=features),
        backbone_channel_list=[384, 192, 96, 48],
        backbone_feature_sizes=_pyramid(size // 16),
    )
    # transformers prints a config by comparing it with a default one, and the default one asks the hub for its backbone
    object.__setattr__(vision, "has_no_defaults_at_init", True)
    return EdgeTamModel(EdgeTamConfig(vision_config=vision, prompt_encoder_config={"image_size": size}))


def _mobilesam(size: int) -> torch.nn.Module:
    from libreyolo.models.mobilesam.model import MobileSAMNetwork

    return MobileSAMNetwork()


def _sam_tier(module: str, cls: str, variant: str, model: Callable[[int], torch.nn.Module], settings: Settings) -> Subject:
    wrapper = _wrapper(module, cls, variant, functools.partial(model, settings.size))
    return subject_of(wrapper, dispatch=wrapper.forward_image_embeddings)


def _mobilesam_wrapper(settings: Settings) -> Subject:
    from libreyolo.models.mobilesam.model import LibreMobileSAM

    with offline(), mock.patch.object(LibreMobileSAM, "_init_model", _draw(_mobilesam)):
        wrapper = LibreMobileSAM(device="cpu")
    return subject_of(wrapper, dispatch=wrapper.forward_image_embeddings)


def _picosam3(settings: Settings) -> Subject:
    from libreyolo.models.picosam3.model import LibrePicoSAM3
    from libreyolo.models.picosam3.nn import PicoSAM3Network

    with offline(), mock.patch.object(LibrePicoSAM3, "_init_model", _draw(lambda size: PicoSAM3Network())):
        wrapper = LibrePicoSAM3(device="cpu")
    return subject_of(wrapper, region=wrapper.model)


def _draw(model: Callable[[int], torch.nn.Module]) -> Callable[[Any], torch.nn.Module]:
    """An ``_init_model`` that draws the network instead of loading it."""

    def init(self: Any) -> torch.nn.Module:
        network = model(self.input_size)
        self.processor, self._model_dtype = None, next(network.parameters()).dtype
        return network

    return init


def _bagel(size: int) -> torch.nn.Module:
    """SenseNova's model with the vision tower for that size, and a language model of one small layer that is never run."""
    import torch
    from libreyolo.models.sensenova.modeling.bagel import Bagel, BagelConfig
    from libreyolo.models.sensenova.modeling.qwen2_navit import Qwen2Config, Qwen2ForCausalLM
    from libreyolo.models.sensenova.modeling.siglip_navit import SiglipVisionConfig, SiglipVisionModel

    small = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4}
    released = {"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 26, "num_attention_heads": 16}
    edge = 980 if size == 980 else 112
    vision = SiglipVisionConfig(**(released if size == 980 else small), image_size=edge, patch_size=_PATCH, rope=False)
    language = Qwen2Config(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=128,
        qk_norm=True,
        layer_module="Qwen2MoTDecoderLayer",
    )
    config = BagelConfig(visual_gen=False, llm_config=language, vit_config=vision, vit_max_num_patch_per_side=edge // _PATCH)
    model = Bagel(Qwen2ForCausalLM(language), SiglipVisionModel(vision), config)
    model.vit_model.vision_model.embeddings.convert_conv2d_to_linear(vision)
    return model.to(torch.bfloat16)


def _sensenova(settings: Settings) -> Subject:
    wrapper = _wrapper("sensenova.model", "LibreSenseNovaVision", "7b", functools.partial(_bagel, settings.size))
    model = wrapper.model

    def prepare(tokens: Any, positions: Any, offsets: Any, longest: int) -> None:
        model._vit_graph_aux = (positions, offsets, longest)  # run_vit leaves them there for the region, which takes the tokens alone

    # both ways end where run_vit does, but not through it: it answers every error, a refused capture too, with the eager tower
    def compose(region: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any) -> Any:
            prepare(*args)
            return region(args[0])

        return forward

    def dispatch(*args: Any) -> Any:
        return wrapper._get_graph_runner().run(args[0])

    return dataclasses.replace(subject_of(wrapper, dispatch=dispatch, prepare=prepare), compose=compose)


def _packed(size: int, batch: int) -> tuple[Any, ...]:
    """``batch`` square images as one packed sequence: tokens, positions, offsets, and the tokens of the longest image."""
    edge = size // _PATCH
    side = 980 // _PATCH if size == 980 else 112 // _PATCH
    count = edge * edge
    positions = [row * side + column for row in range(edge) for column in range(edge)]
    return (
        Input((batch * count, 3 * _PATCH * _PATCH), *SIGNED, dtype="bfloat16"),
        Fixed(positions * batch),
        Fixed([count * i for i in range(batch + 1)], dtype="int32"),
        count,
    )


def _image(span: tuple[float, float], size: int, batch: int) -> tuple[Input]:
    return (Input((batch, 3, size, size), *span),)


def _family(
    name: str,
    task: str,
    build: Callable[[Settings], Subject],
    sizes: tuple[int, ...],
    span: tuple[float, float],
    **more: Any,
) -> Family:
    return Family("libreyolo", name, task, build, functools.partial(_image, span), sizes, **more)


def _sam(name: str, cls: str, variant: str, module: str, model: Any, sizes: tuple[int, ...], span: Any = IMAGENET) -> Family:
    # one size each: the encoders are built for the image size of their config
    return _family(name, "segment", functools.partial(_sam_tier, module, cls, variant, model), sizes, span)


_POSITIONS = Expect(
    "wrong",
    "the graph reads the position ids of the call that it was captured with; the next call replaces them, and nothing keeps the "
    "first ones alive (sensenova/modeling/bagel.py, run_vit)",
    cause="stale-address",
    version="1.6",
)

FAMILIES = (
    _family("ppocr", "ocr", _ppocr, (96, 960), IMAGENET, other_size=128),
    _sam("sam", "LibreSAM1", "base", "sam.model", _sam1, (128, 1024)),
    _sam("sam2", "LibreSAM2", "tiny", "sam.sam2", _sam2, (128, 1024)),
    _sam("sam3", "LibreSAM3", "large", "sam.sam3", _sam3, (112, 1008), SIGNED),
    _sam("edgetam", "LibreEdgeTAM", "edge", "sam.edgetam", _edgetam, (128, 1024)),
    _family("mobilesam", "segment", _mobilesam_wrapper, (1024,), BYTES),
    # no native arm: the flag is inherited, but predict() never asks for a graph, and the network has no image encoder
    _family("picosam3", "segment", _picosam3, (96,), IMAGENET, other_size=112, arms=("bare", "graphed")),
    Family(
        "libreyolo",
        "sensenova",
        "vlm",
        _sensenova,
        _packed,
        (112, 980),
        other_size=98,
        dtype="bfloat16",
        expected=dict.fromkeys(("bare", "native"), (_POSITIONS,)),
    ),
)
