"""What to do about a cause, in a sentence. For reports and messages."""

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
