"""LibreYOLO: every family that it flags ``SUPPORTS_CUDA_GRAPH``, with random weights. Importing this imports no model."""

from parity.rows.family import Zoo

from .images import FAMILIES as _IMAGES
from .installed import environment, version, warm
from .towers import FAMILIES as _TOWERS

ZOO = Zoo(
    "libreyolo",
    "libreyolo",
    "pip install 'cuda-graph-parity[libreyolo]'",
    families=(*_IMAGES, *_TOWERS),
    warm=warm,
    version=version,
    environment=environment,
)
