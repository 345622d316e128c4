"""One sabotage per check of the protocol, each caught by the check named with it and by none before."""

from __future__ import annotations

from parity.rows.family import Expect, Family

from .healthy import builder, rows_of


def _wrong(check: str, cause: str, reason: str) -> Expect:
    return Expect("wrong", reason, cause, check=check)


def _refused(cause: str, reason: str) -> Expect:
    return Expect("uncapturable", reason, cause, check="capture")


def _family(name: str, model: str, bare: tuple[Expect, ...], graphed: tuple[Expect, ...] = (), other_size: int | None = None) -> Family:
    return Family(
        "controls",
        name,
        "sabotaged",
        builder(model),
        rows_of,
        sizes=(8,),
        other_size=other_size,
        arms=("bare", "graphed"),
        expected={"bare": bare, "graphed": graphed},
    )


def _native(name: str, native: str, expect: Expect) -> Family:
    return Family(
        "controls", name, "sabotaged", builder("Plain", native), rows_of, sizes=(8,), arms=("native",), expected={"native": (expect,)}
    )


def _both(name: str, model: str, *expect: Expect) -> Family:
    return _family(name, model, expect, expect)


_REPLACED = "replaces a table on every call, so that the graph reads the one that died at its capture"
_ONE_ENTRY = "keeps a table for one shape only, which the next shape replaces, as a one-entry anchor cache does"

FAMILIES = (
    _both("drawn_outside_the_seed", "DrawnOutsideTheSeed",
          Expect("unstable", "two fresh modules with one seed return other numbers", "nondeterministic-kernel", check="eager_repeat")),
    _both("ignores_its_input", "IgnoresItsInput",
          Expect("vacuous", "returns the same bits whatever it is given", "dead-input", check="input_dependence")),
    _both("reads_a_value", "ReadsAValue", _refused("host-sync", "branches on a device value, which the host must read")),
    _both("copies_to_the_host", "CopiesToTheHost", _refused("d2h-copy", "copies a result to the host in the forward")),
    _both("builds_a_literal", "BuildsALiteral", _refused("h2d-copy", "makes a device tensor from Python numbers in the forward")),
    _both("counts_positives", "CountsPositives", _refused("data-dependent-shape", "selects by a mask, so the shape depends on values")),
    _both("leaves_a_stream", "LeavesAStream", _refused("side-stream", "launches on a stream that never joins the captured one")),
    _native("runs_eagerly_in_secret", "RunsEagerly",
            Expect("not_graphed", "claims to be graphed and only calls the module", "host-state", check="capture")),
    _both("counts_its_calls", "CountsItsCalls", _wrong("replay", "python-counter", "a Python counter scales the result of every call")),
    _both("feeds_its_output_back", "FeedsItsOutputBack",
          _wrong("replay", "output-aliasing", "blends the last result into the next one")),
    _native("skips_inputs_it_has_seen", "SkipsRepeatedInputs",
            _wrong("poison", "host-state", "returns what stands in the graph's output without replaying")),
    _family("replaces_its_table", "ReplacesItsTable",
            (Expect("wrong", _REPLACED, "stale-address", engines=("cuda",), check="churn"),
             Expect("wrong", _REPLACED, "stale-address", engines=("emulated",))),  # there its first replay may read poison already
            (_wrong("escape", "stale-address", "leaves in its place a table that belongs to the graph"),)),
    _family("one_entry_cache", "OneEntryCache", (_wrong("interleave", "stale-address", _ONE_ENTRY),), other_size=12),
    _family("one_entry_cache_of_64_mb", "OneEntryCache64MB", (_wrong("interleave", "stale-address", _ONE_ENTRY),), other_size=12),
    _family("caches_scaled_weights", "CachesScaledWeights",
            (_wrong("weights", "stale-constant", "keeps a tensor derived from the weights, renewed only in Python"),)),
    _native("hands_out_its_own_memory", "HandsOutStatics",
            _wrong("held_outputs", "output-aliasing", "returns the graph's own output, which the next replay overwrites")),
    _family("writes_to_its_input", "WritesToItsInput",
            (_wrong("inputs_untouched", "input-mutation", "adds in place into the tensor it was given"),),
            (_refused("input-mutation", "adds in place into the tensor it was given"),)),
    _both("caches_during_capture", "CachesDuringCapture",
          _wrong("escape", "stale-address", "fills a cache while it is captured, in memory that belongs to the graph")),
)  # fmt: skip
