"""Operator logs: how they are read, and replays against the published simulator's numbers.

The numbers are those of the DTR authors' simulator on their own logs, to the nanosecond and the byte.
"""

from __future__ import annotations

import functools
import gzip
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from graphs.errors import InputError
from graphs.importers.dtr_program import read_program
from graphs.program import Call, Program
from online import DEFAULT_RULE, Replay, RunStatus, baseline_peak_bytes, replay_log

Log = Callable[[str], Program]

# Reading


def instruction(kind: str, **fields: object) -> str:
    return json.dumps({"INSTRUCTION": kind, **fields})


def call(name: str, arguments: str, results: str, time_ns: int, sizes: list[int], aliases: list[int]) -> list[str]:
    lines = [instruction("CALL", NAME=name, ARGS=list(arguments), RESULT=list(results), TIME=str(time_ns))]
    for result, size, alias in zip(results, sizes, aliases, strict=True):
        lines += [
            instruction("MEMORY", NAME=result, MEMORY=str(size)),
            instruction("ALIAS", NAME=result, ALIAS=str(alias)),
        ]
    return lines


LOG = [
    *call("before", "", "z", 99, [1000], [-1]),  # before START: not part of the log
    instruction("ANNOTATE", ANNOTATION="START"),
    instruction("CONSTANT", NAME="w"),  # tensor 0, storage 0
    instruction("MEMORY", NAME="w", MEMORY="100"),
    *call("mm", "w", "a", 7, [40], [-1]),  # tensor 1, storage 1
    *call("split", "aa", "bc", 5, [0, 16], [1, -1]),  # tensor 2 is a view of a, tensor 3 is storage 2
    instruction("RELEASE", NAME="a"),  # the view holds storage 1
    instruction("COPY", DST="d", SRC="b"),
    instruction("RELEASE", NAME="b"),
    instruction("MUTATE", NAME="add_", ARGS=["d", "c"], MUTATE=["0"], TIME="3"),  # tensor 4, storage 3, all 40 bytes
    instruction("RELEASE", NAME="nobody"),
    instruction("ANNOTATE", ANNOTATION="BACKWARD"),
    instruction("COPY_FROM", DST="c", SRC="d"),  # c names tensor 4 too; storage 2 has no name left
    *call("relu", "c", "e", 2, [8], [-1]),  # tensor 5, storage 4
    instruction("RELEASE", NAME="d"),
]


def written(path: Path, lines: list[str]) -> Path:
    path.write_bytes(gzip.compress("\n".join(lines).encode()))
    return path


def test_names_become_tensors_and_storages(tmp_path: Path) -> None:
    program = read_program(written(tmp_path / "tiny.log.gz", LOG))
    assert program == Program(
        name="tiny",
        names=("w", "a", "c", "d", "e"),
        size_bytes=(100, 40, 16, 40, 8),
        resident=frozenset(),
        pinned=frozenset({0}),
        calls=(
            Call("constant", (), (0,), 0),
            Call("mm", (0,), (1,), 7),
            Call("split", (1, 1), (1, 2), 5),
            Call("add_", (2, 3), (3,), 3),
            Call("relu", (4,), (4,), 2),
        ),
        events=(0, 1, 2, 3, -1 - 1, -1 - 2, 4),  # storage 1 goes when the mutation takes its last name away
        kept=(0, 4, 5),  # w, then c (whose name is older than e)
        backward_at=4,
    )
    assert program.base_time_ns == 17


def test_a_replay_by_hand(tmp_path: Path) -> None:
    program = read_program(written(tmp_path / "tiny.log.gz", LOG))
    # w and a: 140. split: + 16 = 156. add_ makes 40 beside them: 196, the peak; then a and c go, and relu makes 8.
    assert baseline_peak_bytes(program) == 196
    assert replay_log(program, 196).steps == (0, 1, 2, 3, -2, -3, 4)
    # With 172 bytes all is pinned or held while add_ runs: its inputs are the view of a, and c.
    stopped = replay_log(program, 172)
    assert (stopped.status, stopped.time_ns, stopped.peak_bytes) == (RunStatus.OUT_OF_MEMORY, 12, 156)
    assert stopped.failure is not None
    assert (stopped.failure.op, stopped.failure.asked_bytes) == ("add_", 196)
    assert stopped.failure.held == (("w", 100), ("a", 40), ("c", 16))


def test_a_log_without_times_is_stopped_too(tmp_path: Path) -> None:
    # Each call reads the last two results, which go as soon as nothing holds them: to rebuild the last takes as many runs as a
    # Fibonacci number says.
    names = "abcdefghijklmnopqrstuvwxyz"
    lines = [instruction("ANNOTATE", ANNOTATION="START")]
    for i, name in enumerate(names):
        lines += call("add", names[max(0, i - 2) : i][::-1], name, 0, [1], [-1])
    lines += [instruction("RELEASE", NAME=name) for name in names[:-1]]
    lines += [*call("room", "", "R", 0, [60], [-1]), instruction("RELEASE", NAME="R"), *call("last", "z", "S", 0, [1], [-1])]
    program = read_program(written(tmp_path / "free.log.gz", lines))
    done = replay_log(program, 60, heuristic="lru", reclaim=True)
    assert (done.status, done.counters.recomputations) == (RunStatus.THRASHED, 28_001)
    assert (done.time_ns, done.slowdown) == (0, 1.0)
    with pytest.raises(InputError, match="thrash_limit must be at least 1"):
        replay_log(program, 60, thrash_limit=0.5)
    with pytest.raises(InputError, match="seed must be"):
        replay_log(program, 60, heuristic="random", seed=-1)
    assert replay_log(program, 60, heuristic="lru+reclaim").steps == done.steps
    with pytest.raises(InputError, match=r"its bytes add up to 2\^62 bytes or more"):
        replay_log(replace(program, size_bytes=(1 << 62, *program.size_bytes[1:])), 60)
    with pytest.raises(InputError, match="baseline_peak_bytes takes a Program"):
        baseline_peak_bytes("log")  # type: ignore[arg-type]


def test_a_view_is_rebuilt_after_its_base(tmp_path: Path) -> None:
    lines = [
        instruction("ANNOTATE", ANNOTATION="START"),
        *call("base", "", "a", 7, [40], [-1]),
        *call("view", "a", "b", 1, [40], [0]),
        *call("other", "", "c", 1, [60], [-1]),
        instruction("RELEASE", NAME="c"),
        *call("read", "b", "d", 2, [8], [-1]),
    ]
    done = replay_log(read_program(written(tmp_path / "view.log.gz", lines)), 60)
    # other drives out storage 0; read needs its view, so base runs, then view. At the end a and b are there together.
    assert done.steps == (0, 1, -1, 2, -2, 0, 1, 3)
    assert done.counters.recomputed_ns == 8
    assert done.slowdown == 19 / 11


def test_reclaiming_spares_a_view_that_was_asked_for(tmp_path: Path) -> None:
    lines = [
        instruction("ANNOTATE", ANNOTATION="START"),
        *call("base", "", "a", 7, [40], [-1]),
        *call("view", "a", "b", 1, [40], [0]),
        *call("use", "b", "c", 5, [8], [-1]),
        instruction("RELEASE", NAME="a"),
        instruction("RELEASE", NAME="b"),
        *call("other", "", "d", 1, [60], [-1]),
        instruction("RELEASE", NAME="d"),
        *call("read", "c", "e", 2, [8], [-1]),
    ]
    program = read_program(written(tmp_path / "view.log.gz", lines))
    # other drives out c. Rebuilding it takes base and view; then nobody needs storage 0, which the program has dropped.
    start = (0, 1, 2, -1, -2, 3, -3, 0, 1, 2)
    assert replay_log(program, 60).steps == (*start, 4)
    assert replay_log(program, 60, reclaim=True).steps == (*start, -1, 4)


def test_what_is_awaited_counts_in_sums_made_meanwhile(tmp_path: Path) -> None:
    """As in the authors' simulator."""
    lines = [
        instruction("ANNOTATE", ANNOTATION="START"),
        *call("base", "", "p", 2, [20], [-1]),
        *call("left", "p", "x", 1, [20], [-1]),
        *call("right", "p", "y", 1, [10], [-1]),
        *call("dear", "", "z", 10, [20], [-1]),
        *call("rival", "", "r", 10, [20], [-1]),
        *call("both", "pr", "b", 1, [20], [-1]),
        instruction("RELEASE", NAME="b"),
        *call("join", "xzy", "f", 50, [10], [-1]),
        *[instruction("RELEASE", NAME=name) for name in "pxyzr"],
    ]
    done = replay_log(read_program(written(tmp_path / "await.log.gz", lines)), 70, thrash_limit=9)
    # join waits for x, z and y; x is back, and z needs room: p or r goes. Scores, r: (10 + b 1) / (20 * 2) = 0.275; p, whose sum
    # was made anew when x came: (2 + b 1 + y 1 + join 50) / (20 * 1), but 4 / 20 without join; then p would go.
    before = (0, 1, 2, 3, -1 - 1, 4, -1 - 2, -1 - 3, 5, -1 - 5)
    assert done.steps == (*before, 1, -1 - 4, 3, 2, -1 - 0, 6, -1 - 1, -1 - 2, -1 - 3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda lines: lines[:8], r"line \d+: mm has 1 results, 1 sizes and 0 aliases"),
        (lambda lines: [*lines[:5], *lines[6:]], r"line 6: the size of w is missing"),
        (lambda lines: [*lines, instruction("COPY", DST="x", SRC="nobody")], r"line \d+: nobody names no tensor here"),
        (lambda lines: [*lines, instruction("JUMP")], r"line \d+: unknown instruction 'JUMP'"),
        (lambda lines: [*lines, "{"], r"is damaged at line \d+: "),
        (lambda lines: lines[:4], r"holds no operator call that makes anything after a START mark"),
        (lambda lines: [*lines, *call("f", "e", "g", 1, [4], [3])], r"is damaged at line \d+: "),
    ],
)
def test_damaged_logs_are_named(tmp_path: Path, change: object, message: str) -> None:
    path = written(tmp_path / "bad.log.gz", change(LOG))  # type: ignore[operator]
    with pytest.raises(InputError, match=message) as caught:
        read_program(path)
    assert "bad.log.gz" in str(caught.value)


def test_a_missing_log_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot read"):
        replay_log(tmp_path / "none.log.gz", 0.5)


# Parity


@functools.cache
def read(path: Path) -> Program:
    return read_program(path)


replayed = functools.cache(replay_log)  # the tables have cells in common


@pytest.fixture
def log(data: Path) -> Log:
    """Operator logs of the data folder, by name."""

    def find(name: str) -> Program:
        path = data / "dtr_logs" / f"{name}.log.gz"
        if not path.exists():
            pytest.skip(f"{path} is not there")
        return read(path)

    return find


# log, ratio, heuristic: status, rematerialized ns, peak bytes, evictions to make room, score evaluations, deepest, executions
GOLDEN = """
    unet 0.9 dtr        COMPLETED  14405888 7438450340   7    793  3  409
    unet 0.9 dtr_eq     COMPLETED  14405888 7438450340   7    793  3  409
    unet 0.9 local      COMPLETED  12127459 7438450868   4    463  5  407
    unet 0.9 msps       COMPLETED   6962674 7444964288   3    355  4  403
    unet 0.9 lru        COMPLETED  16842511 7250272184   7    788  7  406
    unet 0.9 size       COMPLETED  18904551 7250715584   5    598  4  406
    unet 0.6 dtr        COMPLETED  56934912 5018330816  26   2626  8  440
    unet 0.6 dtr_eq     COMPLETED  64823952 5018330816  29   2962  8  442
    unet 0.5 dtr        COMPLETED  69099020 4206747840  38   3745 10  447
    unet 0.5 msps       COMPLETED  57664457 4192773824  45   4418  7  452
    unet 0.5 lru        THRASHED  436898812 4203769124 482  19360 48  614
    resnet32 0.5 dtr    COMPLETED  31171049 5025934272  37   4290  5  546
    resnet32 0.5 dtr_eq COMPLETED  31171049 5025934272  37   4290  5  546
    resnet32 0.5 local  COMPLETED  57367013 5025917696  46   5723 31  566
    resnet32 0.2 dtr    COMPLETED 108319018 1968927488 102   9555 15  616
    resnet32 0.2 dtr_eq COMPLETED  96959555 1968775184  97   8837 15  609
    transformer 0.5 dtr COMPLETED  16132164 4931087872  32   6396  4 3184
    transformer 0.5 dtr_eq COMPLETED 16132164 4931087872 32  6396  4 3184
    treelstm 0.5 dtr    COMPLETED  14831297   85040800 481 305338  7 7567
    treelstm 0.5 dtr_eq COMPLETED  15277796   85054008 481 306864  7 7561
    unroll_gan 0.5 dtr  COMPLETED   8358449  126300640 148  76822 21 7021
"""

BASELINE_PEAK_BYTES = {
    "unet": 8_415_764_640,
    "resnet32": 10_061_179_152,
    "inceptionv4": 11_245_348_984,
    "tv_densenet121": 11_020_749_360,
    "transformer": 9_864_405_000,
    "treelstm": 170_173_608,
    "lstm": 5_595_127_736,
    "unroll_gan": 252_677_418,
}

# time / base time at ratios 1.0, 0.9 ... 0.1, to three decimals
SLOWDOWN = """
    unet dtr      1.003 1.033 1.058 1.085 1.131 1.159 OOM   OOM   OOM   OOM
    unet dtr_eq   1.003 1.033 1.058 1.085 1.149 1.159 OOM   OOM   OOM   OOM
    unet local    1.003 1.028 1.056 1.091 1.137 1.847 OOM   thr   OOM   OOM
    unet msps     1.003 1.016 1.033 1.049 1.088 1.132 1.241 1.585 OOM   OOM
    unet lru      1.008 1.039 1.062 1.104 1.225 thr   OOM   thr   OOM   OOM
    unet size     1.013 1.043 1.128 1.158 1.592 1.659 OOM   OOM   OOM   OOM
    unet ignore   1.157 1.333 1.223 1.199 1.725 1.759 OOM   OOM   OOM   OOM
    resnet32 dtr    1.002 1.013 1.025 1.046 1.074 1.107 1.140 1.178 1.371 thr
    resnet32 dtr_eq 1.002 1.013 1.025 1.046 1.074 1.107 1.140 1.179 1.332 OOM
    resnet32 local  1.002 1.013 1.041 1.067 1.133 1.197 thr   thr   thr   OOM
    resnet32 msps   1.002 1.013 1.024 1.037 1.063 1.106 1.146 1.209 1.431 OOM
    resnet32 lru    1.003 1.032 1.067 1.095 1.130 thr   thr   thr   thr   OOM
    resnet32 size   1.002 1.030 1.065 1.092 1.234 1.452 1.738 thr   thr   OOM
    resnet32 ignore 1.134 1.170 1.196 1.246 1.332 1.386 1.561 1.845 thr   thr
    transformer dtr    1.002 1.009 1.020 1.031 1.044 1.058 1.083 1.123 1.352 thr
    transformer dtr_eq 1.002 1.009 1.020 1.031 1.044 1.058 1.091 1.124 1.545 OOM
    transformer local  1.002 1.010 1.022 1.037 1.060 1.112 1.161 1.505 1.642 OOM
    transformer msps   1.001 1.009 1.018 1.035 1.048 1.067 1.089 1.113 1.333 OOM
    transformer lru    1.000 1.033 1.065 1.098 1.134 thr   thr   thr   thr   thr
    transformer size   1.002 1.016 1.028 1.046 1.053 1.066 1.080 1.135 thr   thr
    transformer ignore 1.132 1.156 1.175 1.192 1.211 1.235 1.281 1.322 1.781 thr
    lstm dtr    1.000 1.017 1.028 1.032 1.042 1.065 1.143 1.301 1.598 OOM
    lstm dtr_eq 1.000 1.017 1.027 1.031 1.042 1.071 1.159 1.365 1.550 OOM
    lstm local  1.000 1.013 1.060 1.110 1.158 thr   thr   thr   OOM   OOM
    lstm msps   1.000 1.023 1.031 1.041 1.057 1.071 1.121 1.382 thr   thr
    lstm lru    1.000 1.043 1.086 1.130 thr   thr   thr   thr   OOM   OOM
    lstm size   1.000 thr   thr   thr   thr   thr   thr   thr   thr   thr
    lstm ignore 1.270 1.289 1.314 1.371 1.495 1.625 1.850 thr   thr   thr
"""


def rows(table: str) -> list[list[str]]:
    return [line.split() for line in table.strip().splitlines()]


def cell(done: Replay) -> str:
    words = {RunStatus.OUT_OF_MEMORY: "OOM", RunStatus.THRASHED: "thr"}
    return words.get(done.status, f"{done.slowdown:.3f}")


@pytest.mark.parametrize("row", rows(GOLDEN), ids=lambda row: " ".join(row[:3]))
def test_golden_values(log: Log, row: list[str]) -> None:
    name, ratio, heuristic, *wanted = row
    done = replayed(log(name), float(ratio), heuristic=heuristic)
    counters = done.counters
    found = [
        done.status, counters.recomputed_ns, done.peak_bytes, counters.evictions, counters.evaluations, counters.deepest,
        counters.executions,
    ]  # fmt: skip
    assert [str(number) for number in found] == wanted


@pytest.mark.parametrize("name", BASELINE_PEAK_BYTES)
def test_baseline_peaks(log: Log, name: str) -> None:
    assert baseline_peak_bytes(log(name)) == BASELINE_PEAK_BYTES[name]
    banishing = replay_log(log(name), 1 << 50, release="banish")
    assert (banishing.peak_bytes, banishing.slowdown) == (BASELINE_PEAK_BYTES[name], 1.0)


@pytest.mark.parametrize("name", ["unet", "resnet32", "transformer", "lstm"])
def test_tables_of_slowdowns(log: Log, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    cells = 0
    for found_name, rule, *wanted in rows(SLOWDOWN):
        if found_name != name:
            continue
        for ratio, value in zip((1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1), wanted, strict=True):
            options = {"release": "ignore"} if rule == "ignore" else {"heuristic": rule}
            found = cell(replayed(log(name), ratio, **options))  # type: ignore[arg-type]
            assert found == value, f"{name} {rule} {ratio}: {found}, not {value}"
            cells += 1
    with capsys.disabled():
        print(f"\n{name}: {cells} of {cells} cells of the published tables agree")


# log, ratio: published metadata accesses of h_DTR, h_DTR^eq and h_DTR^local
METADATA = """
    unet        0.9  172990   8116    463
    unet        0.5  294725  31876  22012
    resnet32    0.9  542241  11819   1115
    resnet32    0.5 1482601  32110   5723
    resnet32    0.3 1754835  39443  71734
    transformer 0.9 1510000  29572   1754
    transformer 0.7 8000000  46203   4794
    transformer 0.3 26690000 93296 135926
"""


@pytest.mark.parametrize("name", ["unet", "resnet32", "transformer"])
def test_metadata_accesses(log: Log, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """h_DTR^local looks at nothing but the pool, so its count is that of any implementation. The others' sums are kept up to date
    by the authors at every eviction, and here found where a bound does not do: the same choices for fewer accesses.
    """
    agree, saved = [], []
    for found_name, ratio, *wanted in rows(METADATA):
        if found_name != name:
            continue
        for rule, published in zip(("dtr", "dtr_eq", "local"), map(int, wanted), strict=True):
            counters = replayed(log(name), float(ratio), heuristic=rule).counters
            assert counters.metadata_accesses == counters.evaluations + counters.visits
            if rule == "local":
                assert counters.visits == 0
                agree.append(counters.metadata_accesses == published)
            else:
                saved.append(published / counters.metadata_accesses)
                assert counters.visits > 0 and saved[-1] > 1
    assert all(agree)
    fewer = f"those of h_DTR and h_DTR^eq are {min(saved):.0f} to {max(saved):.0f} times fewer"
    with capsys.disabled():
        print(f"\n{name}: {len(agree)} of {len(agree)} published metadata accesses of h_DTR^local agree; {fewer}")


@pytest.mark.parametrize(
    ("name", "works", "fails"),
    [
        ("resnet32", (0.098, 0.101, 0.107), (0.102, 0.104, 0.106)),
        ("unet", (0.422, 0.426, 0.431, 0.436), (0.424, 0.433)),
    ],
)
def test_more_memory_may_not_suffice_where_less_did(
    log: Log, name: str, works: tuple[float, ...], fails: tuple[float, ...]
) -> None:
    program = log(name)
    assert all(replay_log(program, ratio, thrash_limit=60).status is RunStatus.COMPLETED for ratio in works)
    assert all(replay_log(program, ratio, thrash_limit=60).status is RunStatus.OUT_OF_MEMORY for ratio in fails)
    assert min(works) < min(fails) < max(works)


@pytest.mark.parametrize(
    ("name", "ratio", "published"),
    [
        ("unet", 0.4, "1.267"),
        ("resnet32", 0.2, "1.286"),
        ("resnet32", 0.1, "1.953"),
        ("transformer", 0.2, "1.177"),
        ("lstm", 0.3, "1.232"),
        ("lstm", 0.2, "1.327"),
        ("treelstm", 0.3, "1.233"),
        ("treelstm", 0.1, "1.403"),
        ("inceptionv4", 0.3, "1.166"),
        ("inceptionv4", 0.2, "1.287"),
        ("unroll_gan", 0.3, "1.112"),
        ("unroll_gan", 0.2, "1.405"),
        ("unroll_gan", 0.1, "1.866"),
        ("tv_densenet121", 0.2, "1.753"),
        ("tv_densenet121", 0.5, "1.194"),
    ],
)
def test_reclaiming_dead_intermediates(log: Log, name: str, ratio: float, published: str) -> None:
    assert cell(replay_log(log(name), ratio, reclaim=True)) == published


def test_banishing_frees_but_pins(log: Log) -> None:
    assert cell(replay_log(log("unet"), 0.9, release="banish")) == "1.012"
    assert cell(replay_log(log("unet"), 0.8, release="banish")) == "OOM"
    assert replay_log(log("resnet32"), 0.2, release="banish").slowdown == pytest.approx(1.230, abs=0.0015)


@pytest.mark.parametrize("name", ["unet", "resnet32", "transformer"])
def test_the_default_rule_is_better_than_h_dtr(log: Log, name: str) -> None:
    """In the mean over ratios, and nowhere worse by more than one per cent of the base time."""

    def slowdown(rule: str, ratio: float) -> float:
        done = replayed(log(name), ratio, heuristic=rule)
        return done.slowdown if done.status is RunStatus.COMPLETED else 2.0  # where the others are stopped

    ratios = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2)
    ours, theirs = ([slowdown(rule, ratio) for ratio in ratios] for rule in (DEFAULT_RULE, "dtr"))
    assert sum(ours) < sum(theirs) - 0.01
    assert all(a <= b + 0.01 for a, b in zip(ours, theirs, strict=True))
