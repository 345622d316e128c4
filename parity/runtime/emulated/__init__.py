"""An emulated CUDA device with graph capture and replay, for machines without a GPU.

``with device():`` makes "cuda" exist: tensors report it, ``torch.cuda`` works (streams, events, random numbers, ``CUDAGraph``,
``torch.cuda.graph``), and code written for CUDA graphs runs unmodified. Data lies on the host and kernels are the host's, so results
are not a GPU's bits; what carries over are a graph's rules. A capture that breaks one raises CaptureRefused.
Without gradients a product, or a whole replay, of bits that it has met before is copied, not computed again (``repeats``).

It cannot see: noise of the host's own products, kernels that C++ launches on a wrong stream, workspaces, atomics, CUDA's choice of
kernels and autocast lists, reuse of memory in a pool, other threads, torch.jit.script bodies that ask for a device.
"""

from .addresses import DeadRead
from .entry import device
from .graph import CUDAGraph
from .memory import is_marked

__all__ = ["CUDAGraph", "DeadRead", "device", "is_marked"]
