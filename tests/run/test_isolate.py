"""The pool against judges that crash, hang, lie and eat: what counts, what is judged again, and that nothing is left."""

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import textwrap
from collections import Counter
from pathlib import Path

import pytest
from leftovers import processes_with, wait_until

from parity.rows.row import Row, Settings
from parity.run import isolate
from parity.run.isolate import NoDevice, Options, Pool, RunError, probe, warming
from parity.run.lease import Stats

ROOT = Path(__file__).parents[2]
ZOOS = Path(__file__).parent / "fake_zoos"


def row(family="fine", batch=1, arm="graphed", zoo="fake"):
    return Row(zoo, family, "detect", settings=Settings(0, batch), arm=arm)


def options(judge="by_family", **more):
    return Options("emulated", (str(ZOOS),), judge=f"fake_judges:{judge}", **{"slots": 2, "timeout": 30.0, **more})


@pytest.fixture(scope="module")
def pools(shared_folder):
    """Pools by their options: tests that only judge share one server, as runs do."""
    with contextlib.ExitStack() as stack:
        yield functools.cache(lambda *more: stack.enter_context(Pool(options(**dict(more)))))


@pytest.fixture
def run(pools, shared_folder):
    """Judges groups: outcomes by row id, in order of completion, and the statistics of this run."""

    def judge(groups, hints=None, suspects=(), **more):
        pool = pools(*more.items())
        pool.stats = Stats()
        (shared_folder / "judged").unlink(missing_ok=True)
        outcomes = {outcome.row: outcome for outcome in pool.run(groups, hints, suspects)}
        assert pool.stats.rows == len(outcomes) == sum(len(group) for group in groups)
        return outcomes, pool.stats

    return judge


MISDEEDS = "exits segfaults raises leaves hangs family_hangs prints downloads downloads_quietly confesses confesses_and_hangs boasts"


@pytest.fixture(scope="module")
def deeds(shared_folder):
    """What becomes of a row of each kind, each in a child of its own; by family."""
    groups = [[row(family)] for family in MISDEEDS.split()]
    with Pool(options(isolation="fork", slots=4, timeout=3.0, seed=3)) as pool:
        return {Row.parse(outcome.row).family: outcome for outcome in pool.run(groups)}


def figures(outcome):
    return outcome.checks[0].figures


def judged(folder):
    """(row id, process, how many rows it had seen) per call of a fake judge, in order."""
    lines = (folder / "judged").read_text().splitlines()
    return [(id_, int(pid), int(nth)) for id_, pid, nth in (line.split() for line in lines)]


# ---- groups and children


def test_a_group_stays_in_one_child_and_in_order(run):
    group = [row(arm=arm) for arm in ("eager", "bare", "graphed", "native")]
    outcomes, stats = run([group])
    assert list(outcomes) == [r.id for r in group]
    assert len({figures(o)["pid"] for o in outcomes.values()}) == 1
    assert [figures(o)["nth"] for o in outcomes.values()] == [1, 2, 3, 4]
    assert {figures(o)["eager"] for o in outcomes.values()} == {1}, "the child's cache of the subject was not kept"
    assert stats.children == 1
    assert len(stats.starts) == 1
    assert stats.waiting > 0


def test_clean_children_take_many_groups(run):
    outcomes, stats = run([[row(batch=n)] for n in range(1, 13)])
    assert stats.children == 2
    assert len({figures(o)["pid"] for o in outcomes.values()}) <= 2


@pytest.mark.parametrize("isolation", ["fork", "spawn"])
def test_a_process_per_row(run, isolation):
    outcomes, stats = run([[row(arm=arm) for arm in ("bare", "graphed")]], isolation=isolation)
    assert len({figures(o)["pid"] for o in outcomes.values()}) == stats.children == 2
    assert {figures(o)["nth"] for o in outcomes.values()} == {1}


def test_hints_start_long_groups_first(run):
    hints = {row(batch=n).id: float(n) for n in (1, 2, 3)}
    outcomes, _ = run([[row(batch=n)] for n in (1, 2, 3)], hints, slots=1)
    assert [Row.parse(id_).settings.batch for id_ in outcomes] == [3, 2, 1]


def test_a_pool_runs_twice_and_takes_new_zoos(folder):
    with Pool(options()) as pool:
        first = list(pool.run([[row()]]))
        server = pool._nursery.process.pid
        again = list(pool.run([[row()]]))
        assert pool._nursery.process.pid == server, "the same zoos need no new server"
        other = list(pool.run([[row(zoo="rotten")]]))
    assert [o.status for o in first + again + other] == ["judged", "judged", "broken"]


def test_a_server_that_imports_already_is_taken_over(folder, monkeypatch):
    chosen = options()
    server = warming(chosen.sources, ["fake"], chosen.judge)
    monkeypatch.setattr(isolate, "Nursery", lambda settings: pytest.fail("another server was started"))
    with Pool(chosen, server) as pool:
        assert [o.status for o in pool.run([[row()]])] == ["judged"]
    assert server.process.returncode is not None


@pytest.mark.parametrize(("zoo", "status"), [("needy", "unavailable"), ("fake", "broken")])
def test_a_zoo_that_was_only_looked_for_says_what_it_lacks(folder, zoo, status):
    chosen = options("lacking")
    with Pool(chosen, warming(chosen.sources, [zoo], chosen.judge)) as pool:
        (found,) = pool.run([[row(zoo=zoo)]])
    assert found.status == status
    assert ("pip install needy[all]" in found.message) == (zoo == "needy")


def test_a_server_that_was_not_needed_ends_with_the_pool(folder):
    server = warming(options().sources, ["fake"], options().judge)
    with Pool(options(), server):
        pass
    assert server.process.returncode is not None
    server.close()  # by its owner, once more


# ---- judged again


def test_only_the_verdict_of_a_fresh_child_counts(run, shared_folder):
    group = [row("first_only", n) for n in (1, 2, 3)]
    outcomes, stats = run([group], slots=1)
    assert list(outcomes) == [r.id for r in group]
    assert [o.checks[0].status for o in outcomes.values()] == ["passed"] * 3
    assert stats.again == 2
    assert [nth for _, _, nth in judged(shared_folder)] == [1, 2, 1, 2, 1]


def test_a_row_that_fails_in_a_fresh_child_too_has_failed(run, shared_folder):
    rows = [row(), row("always"), row(batch=2)]
    outcomes, stats = run([rows], slots=1)
    assert [o.checks[0].status for o in outcomes.values()] == ["passed", "failed", "passed"]
    assert Counter(id_ for id_, _, _ in judged(shared_folder)) == {rows[0].id: 1, rows[1].id: 2, rows[2].id: 1}
    pids = {id_: pid for id_, pid, _ in judged(shared_folder)}
    assert pids[rows[1].id] != pids[rows[2].id], "a child went on after an outcome that was not clean"
    assert stats.again == 1


def test_a_failure_in_a_fresh_child_is_not_judged_again(run, shared_folder):
    outcomes, stats = run([[row("always")]])
    assert next(iter(outcomes.values())).checks[0].status == "failed"
    assert (stats.again, len(judged(shared_folder))) == (0, 1)


def test_a_suspect_goes_to_a_fresh_child_at_once(run, shared_folder):
    rows = [row(), row("always"), row(batch=2)]
    outcomes, stats = run([rows], suspects={rows[1].id}, slots=1)
    assert [o.checks[0].status for o in outcomes.values()] == ["passed", "failed", "passed"]
    assert [nth for id_, _, nth in judged(shared_folder) if id_ == rows[1].id] == [1], "judged in a used child first"
    assert stats.again == 0


def test_crashes_in_a_used_child_are_judged_again(run):
    outcomes, stats = run([[row(), row("exits"), row(batch=2)]], slots=1)
    assert [o.status for o in outcomes.values()] == ["judged", "crashed", "judged"]
    assert (stats.again, stats.children) == (1, 3)


# ---- what a row can do


def test_exit(deeds):
    outcome = deeds["exits"]
    assert outcome.status == "crashed"
    assert outcome.message == "the child left by itself, with exit code 7\nabout to leave"
    assert outcome.seconds["total"] >= 0
    assert outcome.environment["zoo"] == "1.2.3", "a dead child's row has its environment all the same"


def test_segfault_names_the_line(deeds):
    outcome = deeds["segfaults"]
    assert outcome.status == "crashed"
    assert outcome.message.startswith("the child died of SIGSEGV\nFatal Python error")
    assert "fake_judges.py" in outcome.message
    assert "in _segfaults" in outcome.message
    assert "parity/run" not in outcome.message


def test_exception(deeds):
    outcome = deeds["raises"]
    assert outcome.status == "broken"
    assert outcome.message.startswith("ValueError: this builder is wrong (at ")
    assert "fake_judges.py:" in outcome.message
    assert outcome.seed == 3


def test_sys_exit_is_broken(deeds):
    assert deeds["leaves"].message.startswith("SystemExit: a model that calls sys.exit")


def test_timeout_names_the_line(deeds):
    outcome = deeds["hangs"]
    assert outcome.status == "timed_out"
    assert outcome.message.startswith("no answer within 3 s")
    assert "in _hangs" in outcome.message
    assert outcome.seconds["total"] >= 3.0


def test_timeout_ends_grandchildren_and_those_that_ignore_sigterm(deeds, shared_folder):
    assert deeds["family_hangs"].status == "timed_out"
    for session in (False, True):
        pid = int((shared_folder / f"grandchild-{session}").read_text())
        wait_until(lambda pid=pid: not _alive(pid), f"grandchild {pid} (own session: {session})")


def _alive(pid):
    stat = Path(f"/proc/{pid}/stat")
    try:
        return stat.read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_much_output_blocks_nothing_and_its_end_is_kept(deeds):
    outcome = deeds["prints"]
    assert outcome.message.startswith("the child left by itself, with exit code 3\n")
    assert outcome.message.endswith("the end")
    assert len(outcome.message.splitlines()) == 13


def test_network(deeds):
    outcome = deeds["downloads"]
    assert outcome.status == "unavailable"
    assert outcome.message.startswith("row needs the network: it asked for weights.example.org")
    assert "fake_judges.py:" in outcome.message


def test_network_that_a_row_hushes_up_is_noted(deeds):
    outcome = deeds["downloads_quietly"]
    assert outcome.status == "judged"
    assert outcome.notes == ("asked for the network: 192.0.2.1",)


def test_out_of_memory_is_judged_once_more_alone(run, shared_folder):
    groups = [[row("hungry_once")], *([row(batch=n)] for n in range(1, 7))]
    outcomes, stats = run(groups)
    assert list(outcomes)[-1] == row("hungry_once").id
    assert outcomes[row("hungry_once").id].status == "judged"
    assert stats.alone == 1
    assert (shared_folder / "others").read_text() == "0", "something else was running on the device"


def test_out_of_memory_twice_is_itself(run, shared_folder):
    outcomes, stats = run([[row("hungry"), row()]])
    assert outcomes[row("hungry").id].status == "out_of_memory"
    assert "CUDA out of memory" in outcomes[row("hungry").id].message
    assert outcomes[row().id].status == "judged"
    assert stats.alone == 1
    assert len([1 for id_, _, _ in judged(shared_folder) if id_ == row("hungry").id]) == 2


@pytest.mark.parametrize(
    ("judge", "words"),
    [("tensor", "not plain data: Object of type Tensor"), ("of_another", "must return this row's outcome")],
)
def test_what_is_no_outcome_of_the_row_is_broken(folder, judge, words):
    with Pool(options(judge)) as pool:
        (outcome,) = pool.run([[row()]])
    assert outcome.status == "broken"
    assert words in outcome.message


# ---- progress


def test_what_was_handed_in_before_a_crash_counts(deeds):
    outcome = deeds["confesses"]
    assert (outcome.status, outcome.checks[0].cause) == ("judged", "stale-address")
    assert outcome.message.startswith("a dead read; then the child died of SIGSEGV")
    assert outcome.environment["zoo"] == "1.2.3"


def test_what_was_handed_in_before_a_timeout_counts(deeds):
    outcome = deeds["confesses_and_hangs"]
    assert (outcome.status, outcome.checks[0].cause) == ("judged", "stale-address")
    assert outcome.message.startswith("no answer within 3 s")


def test_nothing_failed_yet_is_no_pass_for_a_crash(deeds):
    outcome = deeds["boasts"]
    assert outcome.status == "crashed"
    assert outcome.checks[0].status == "passed"


# ---- zoos that are not there


MISSING = {
    "absent": ("unavailable", "no_such_package.models is not installed: pip install no-such-package"),
    "needy": ("unavailable", "zoo needy needs no_such_dependency, which is not installed: pip install needy[all]"),
    "rotten": ("broken", "zoo rotten cannot be imported: RuntimeError: rotten to the core (at "),
}


@pytest.mark.parametrize("isolation", ["warm", "spawn"])
def test_a_zoo_that_cannot_be_imported_says_so_and_the_run_goes_on(run, isolation):
    outcomes, _ = run([*([row(zoo=zoo)] for zoo in MISSING), [row()]], isolation=isolation)
    for zoo, (status, words) in MISSING.items():
        assert outcomes[row(zoo=zoo).id].status == status
        assert outcomes[row(zoo=zoo).id].message.startswith(words)
    assert outcomes[row().id].status == "judged"


def test_a_family_declared_unavailable_is_not_judged_and_spoils_no_child(run, shared_folder):
    outcomes, stats = run([[row("declared"), row()]])
    assert outcomes[row("declared").id].message == "its weights are licensed"
    assert stats.children == 1
    assert [id_ for id_, _, _ in judged(shared_folder)] == [row().id]


def test_a_zoo_that_starts_a_thread_stops_the_run(folder):
    with Pool(options()) as pool, pytest.raises(RunError, match=r"zoo threaded: its warm\(\) left threads running"):
        list(pool.run([[row(zoo="threaded")]]))


@pytest.mark.parametrize("isolation", ["warm", "spawn"])
def test_a_judge_that_does_not_exist_stops_the_run(folder, isolation):
    with Pool(options("no_such_judge", isolation=isolation)) as pool, pytest.raises(RunError, match="no judge 'fake_judges:no_such"):
        list(pool.run([[row()]]))


def test_sources_that_do_not_exist_stop_the_run(folder):
    wrong = Options("emulated", (str(folder / "nowhere"),), judge="fake_judges:by_family")
    with Pool(wrong) as pool, pytest.raises(RunError, match="no such folder of families"):
        list(pool.run([[row()]]))


# ---- the server, the environment


def test_the_server_has_one_thread_and_the_callers_environment_is_untouched(pools):
    before = dict(os.environ)
    pool = pools(("slots", 1))
    assert [o.status for o in pool.run([[row()]])] == ["judged"]
    server = pool._nursery.process.pid
    assert len(os.listdir(f"/proc/{server}/task")) == 1
    environ = Path(f"/proc/{server}/environ").read_bytes().split(b"\0")
    assert {b"OMP_NUM_THREADS=1", b"MKL_NUM_THREADS=1", b"HF_HUB_OFFLINE=1", b"TOKENIZERS_PARALLELISM=false"} <= set(environ)
    assert dict(os.environ) == before


def test_emulated_children_see_no_device(run):
    outcomes, _ = run([[row()]])
    assert figures(outcomes[row().id])["visible"] == ""


def test_a_server_that_dies_ends_the_run_with_its_own_message(folder):
    with Pool(options(slots=1)) as pool:
        outcomes = pool.run([[row(), row("waits")]])
        assert next(outcomes).status == "judged"
        os.kill(pool._nursery.process.pid, signal.SIGKILL)
        with pytest.raises(RunError, match="the process that children are forked from died"):
            list(outcomes)


def test_slots_are_shared_out_over_devices():
    cpus = len(os.sched_getaffinity(0))
    cuda = Options("cuda", (), devices=("GPU-a", "3"), slots=2)
    assert cuda.slots_on(cuda.devices) == ["GPU-a", "3", "GPU-a", "3"]
    assert len(Options("cuda", ()).slots_on(["0"])) == max(1, min(12, cpus - 2))
    assert len(Options("cuda", ()).slots_on([str(n) for n in range(50)])) == max(50, cpus)
    assert len(Options("emulated", ()).slots_on([])) == cpus


@pytest.mark.parametrize("wrong", [{"engine": "tpu"}, {"isolation": "thread"}, {"timeout": 0.0}, {"slots": -1}])
def test_options_refuse_nonsense(wrong):
    (name,) = wrong
    with pytest.raises(ValueError, match=f"^{name}=") as caught:
        Options(**{"engine": "emulated", "sources": (), **wrong})
    assert str(caught.value).count("=") == 1, "the others are not to blame"


def test_a_pool_is_used_in_its_with_statement():
    with pytest.raises(RuntimeError, match="with statement"):
        list(Pool(options()).run([[row()]]))


# ---- deaths from outside


def test_a_child_killed_from_outside_has_its_own_message_and_the_run_goes_on(pools, shared_folder):
    file = shared_folder / "waits-1"
    with subprocess.Popen([sys.executable, "-c", KILL_WHEN_WRITTEN, str(file)], env={"PATH": os.environ["PATH"]}) as killer:
        found = list(pools(("slots", 1)).run([[row("waits"), row()], [row(batch=2)]]))
    assert killer.returncode == 0
    assert [o.status for o in found] == ["crashed", "judged", "judged"]
    assert found[0].message.startswith("the child was ended from outside, by SIGKILL")


KILL_WHEN_WRITTEN = """
import os, pathlib, sys, time
file = pathlib.Path(sys.argv[1])
while not (file.exists() and file.read_text()):
    time.sleep(0.01)
os.kill(int(file.read_text()), 9)
"""


def test_an_idle_child_killed_from_outside_costs_nothing(pools):
    outcomes = pools(("slots", 1)).run([[row(batch=n)] for n in (1, 2, 3)])
    first = next(outcomes)
    os.kill(figures(first)["pid"], signal.SIGKILL)
    rest = list(outcomes)
    assert [o.status for o in [first, *rest]] == ["judged"] * 3


# ---- the caller: no torch, Ctrl-C, sudden death


def _script(body):
    """Starts a script that judges with fake judges."""
    head = f"""
        import sys
        sys.path[:0] = [{str(ROOT)!r}, {str(Path(__file__).parent)!r}]
        from parity.rows.row import Row, Settings
        from parity.run.isolate import Options, Pool, probe
        def row(family="fine", batch=1):
            return Row("fake", family, "detect", settings=Settings(0, batch))
        options = Options("emulated", ({str(ZOOS)!r},), slots=2, judge="fake_judges:by_family")
    """
    text = textwrap.dedent(head) + textwrap.dedent(body)
    return subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_the_caller_imports_no_torch_and_starts_no_thread(folder):
    script = _script(
        """
        import json, os
        found = probe(options.sources)
        with Pool(options) as pool:
            statuses = [outcome.status for outcome in pool.run([[row()], [row("exits")]])]
        print(json.dumps([sorted(statuses), "torch" in sys.modules, "numpy" in sys.modules, len(os.listdir("/proc/self/task"))]))
        """,
    )
    out, err = script.communicate(timeout=60)
    assert json.loads(out) == [["crashed", "judged"], False, False, 1], err


def test_the_script_that_looks_for_torch_would_find_it(folder):
    (folder / "torch.py").touch()
    script = _script(f"sys.path.insert(0, {str(folder)!r})\nimport torch\nprint('torch' in sys.modules)")
    assert script.communicate(timeout=60)[0].strip() == "True"


CONSUME = """
    with Pool(options) as pool:
        for outcome in pool.run([[row(batch=1), row(batch=2)], [row("waits")]]):
            print(outcome.row, outcome.status, flush=True)
"""


def test_ctrl_c_keeps_finished_rows_and_leaves_no_process(folder):
    script = _script(CONSUME)
    lines = [script.stdout.readline().split()[1] for _ in range(2)]
    wait_until((folder / "waits-1").exists, "the waiting row")
    script.send_signal(signal.SIGINT)
    _, err = script.communicate(timeout=20)
    assert lines == ["judged", "judged"]
    assert "KeyboardInterrupt" in err
    assert not processes_with(f"FAKE_JUDGES_FOLDER={folder}")


def test_children_die_with_a_caller_that_is_killed(folder):
    script = _script(CONSUME)
    wait_until((folder / "waits-1").exists, "the waiting row")
    script.kill()
    script.communicate(timeout=20)
    mark = f"FAKE_JUDGES_FOLDER={folder}"
    wait_until(lambda: not processes_with(mark), "the children of a killed caller", 5)


def test_closing_the_iterator_ends_what_runs(folder):
    with Pool(options()) as pool:
        outcomes = pool.run([[row()], [row("waits")]])
        assert next(outcomes).status == "judged"
        outcomes.close()
        assert not processes_with(f"FAKE_JUDGES_FOLDER={folder}")
        assert [o.status for o in pool.run([[row(batch=3)]])] == ["judged"], "a pool can be used again"


# ---- probing


def test_probe_reports_facts_as_a_child_sees_them(folder):
    found = probe([str(ZOOS)], "emulated", ["fake", "absent"])
    assert (found["engine"], found["devices"]) == ("emulated", [])
    environment = found["environment"]
    assert {"gpu", "arch", "driver", "gpus", "torch", "cuda", "cudnn", "python", "zoos"} <= set(environment)
    assert environment["zoos"]["fake"] == {"zoo": "1.2.3", "zoo_facts": {"backend": "none"}}
    assert set(environment["zoos"]) == {"fake", "absent"}


def test_probe_without_a_device(folder, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert probe([str(ZOOS)])["engine"] == "emulated"
    with pytest.raises(NoDevice, match="torch finds no device"):
        probe([str(ZOOS)], "cuda")
    with Pool(Options("cuda", (str(ZOOS),), judge="fake_judges:by_family")) as pool, pytest.raises(NoDevice):
        list(pool.run([[row()]]))


def test_probe_refuses_other_engines():
    with pytest.raises(ValueError, match="auto, cuda, emulated"):
        probe([str(ZOOS)], "tpu")


def test_a_child_that_never_starts_stops_the_probe(folder, monkeypatch):
    monkeypatch.setattr(isolate, "START_LIMIT", 0.0)
    with pytest.raises(RunError, match="no answer from a child within 0 s"):
        probe([str(ZOOS)], "emulated")
