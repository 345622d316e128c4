"""What to do about a cause, in a sentence, and about an operation, where more can be said. For reports and messages."""

from __future__ import annotations

from typing import Final

ADVICE: Final = {
    "host-sync": (
        "the forward waits for the GPU (.item(), .cpu(), printing a tensor): keep the value on the device, or "
        "end the captured region before it"
    ),
    "h2d-copy": "a host tensor is copied to the GPU in the forward: make it a buffer, or create it on the device",
    "d2h-copy": "a tensor is copied to the host in the forward: move that step behind the captured region",
    "data-dependent-shape": (
        "a shape depends on values (nonzero, boolean mask): use a fixed upper size with a mask, or cut the region there"
    ),
    "python-branch": ("Python branches on something that changes between calls: use torch.where, or capture each branch apart"),
    "python-counter": ("a Python number that changes per call is frozen in the graph: keep it as a tensor and update that in place"),
    "host-state": ("state kept on the host is frozen in the graph: keep it in a device buffer, or update it outside the region"),
    "stale-constant": (
        "a value computed once is baked in (often from weights): compute it in the region, or release the graphs when it changes"
    ),
    "stale-address": (
        "the graph reads memory that its owner dropped (a cache replaced by another shape): keep every entry, or register a buffer"
    ),
    "side-stream": (
        "kernels ran on another stream and are missing in the graph: launch on the current stream, or leave the op outside the region"
    ),
    "output-aliasing": "results share memory that the next replay overwrites: clone them before keeping them",
    "input-mutation": "the region writes to its input: work on a copy",
    "rng": ("random numbers differ between replay and eager: register the generator with the graph, or draw outside the region"),
    "buffer-drift": "a buffer moves differently under replay: update it in place, by device operations only",
    "grad-accumulation": "gradients alias the graph's static buffers: clone them before accumulating",
    "dead-input": ("the output does not depend on the input (zero-initialised weights): give it weights that let the input through"),
    "autocast-cache": "eager reuses autocast's cast weights and the capture does not: disable the cache in both",
    "autocast-backward": "the backward was captured inside autocast: capture it outside",
    "grad-layout": "the incoming gradient has other strides in the graph: give the static gradient eager's layout",
    "nondeterministic-kernel": "eager does not repeat itself: use a deterministic algorithm before asking again",
    "reduction-order": "the same sum is taken in another order: fix the algorithm in both arms",
    "unknown": "not understood yet: judge the row again alone, and compare both records with `parity diff`",
}

SPECIFIC: Final = (
    ("host-sync", "_local_scalar_dense", "Python reads a number of the device here (.item(), float(), int(), bool(), a comparison in "
     "an if): choose with torch.where, keep the number as a tensor, or end the captured region before this line"),
    ("host-sync", "tolist", "Python reads a whole tensor here: pass the list as an argument of the forward, or end the region before"),
    ("host-sync", "synchronize", "take the synchronisation out: the caller may wait after the forward"),
    ("host-sync", "printing", "take the print out: it reads the tensor"),
    ("h2d-copy", "indices on the host", "an index was built on the host: build it with device=x.device, or register it as a buffer"),
    ("h2d-copy", "of Python values", "a tensor is made of Python values in every forward: register it as a buffer, or make it on the "
     "device, as torch.full((), value, device=x.device) does"),
    ("h2d-copy", "Tensor.to the device", "a host tensor is moved in every forward: create it with device=x.device, or register it as a "
     "buffer, which moves once with the model"),
    ("data-dependent-shape", "boolean mask", "a mask used as an index: multiply by it, or use torch.where or masked_fill, which keep "
     "the size"),
    ("data-dependent-shape", "nonzero", "how many places there are, only the values know: use topk of a fixed size, or a mask that is "
     "carried along"),
    ("data-dependent-shape", "repeat_interleave", "pass output_size=..., then the size is known without looking"),
    ("data-dependent-shape", "nms", "it keeps as many boxes as the values say: leave it outside the captured region"),
    ("data-dependent-shape", "unique", "how many values differ, only the values know: leave it outside the captured region"),
    ("side-stream", "legacy default stream", "a kernel of this operation is launched on the legacy default stream, so that a graph "
     "does not hold it: leave the operation outside the captured region"),
    ("side-stream", "autograd graph", "the model keeps a tensor of an earlier step together with its graph: detach what is kept"),
    ("side-stream", "never waited for", "join the stream before the forward ends: torch.cuda.current_stream().wait_stream(side)"),
    ("dead-input", "in eager already", "the step is not finite before anything is captured: look at the loss and at its inputs first"),
    ("dead-input", "no trainable parameter", "let what is to be trained require gradients: requires_grad_(True)"),
    ("dead-input", "no parameter gets a gradient", "the loss does not reach a parameter: something on the way is detached"),
    ("dead-input", "every gradient is zero", "zeros on the way stop all gradients: in build(), give such a weight another value"),
    ("dead-input", "no gradient where this arm gives one", "the loss does not use this parameter: use it, freeze it by "
     "requires_grad_(False), or leave it out"),
    ("buffer-drift", "writes to parameter", "make it a buffer, which a warm-up puts back, or update it outside the forward"),
    ("output-aliasing", "a loss that was handed out", "the loss is the graph's own memory: clone it before keeping it"),
    ("output-aliasing", "the gradient of another", "gradients are handed out in another order than that of the parameters: name them"),
    ("host-state", "hands out no gradient", "the backward that was captured leaves a gradient out that eager's gives: it must not ask "
     "whether it is captured"),
    ("rng", "set_rng_state", "the part that is run again in the backward draws random numbers: keep dropout outside of checkpoint(), "
     "or leave that part outside the captured region"),
    ("rng", "seed", "seed outside of the forward, or draw once and keep the numbers in a buffer"),
    ("side-stream", "never joined", "let it wait for the current stream first: side.wait_stream(torch.cuda.current_stream())"),
)  # fmt: skip
"""Cause, a part of the operation's name or of what a check said, and what to do."""


_WORDS: Final = {
    "aten::_local_scalar_dense": "a number is read from the device (.item(), float(), int(), bool(), a comparison in an if)",
    "aten::item": "a number is read from the device (.item())",
    "aten::_unique2": "unique",
}


def spoken(what: str) -> str:
    """An operation's name, with words where it is none that a model's author has ever typed."""
    return f"{_WORDS[what]}: {what}" if what in _WORDS else what


def advise(cause: str, what: str = "") -> str:
    """What to do about a cause. ``what``: the operation it was met at, or what the check that failed says."""
    special = (text for of, part, text in SPECIFIC if of == cause and part in what)
    return next(special, ADVICE.get(cause, ""))
