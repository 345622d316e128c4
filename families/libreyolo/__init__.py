"""LibreYOLO: every family that it flags ``SUPPORTS_CUDA_GRAPH``, and every one whose training it captures, with random weights.

Importing this imports no model.
"""

from parity.rows.family import Zoo

from .images import FAMILIES as _IMAGES
from .installed import environment, version, warm
from .towers import FAMILIES as _TOWERS
from .training import FAMILIES as _TRAINING

ZOO = Zoo(
    "libreyolo",
    "libreyolo",
    "pip install 'cuda-graph-parity[libreyolo]'",
    families=(*_IMAGES, *_TOWERS, *_TRAINING),
    warm=warm,
    version=version,
    environment=environment,
)
