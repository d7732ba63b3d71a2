import time
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftline.signal.live.torch_logs import TorchLogs, read_time
from draftline.signal.trace import Event

NOW_S = time.mktime((2026, 11, 30, 12, 0, 0, 0, 0, -1))


def written(head: str, text: str) -> str:
    """A record as torch writes it: the head before each line."""
    return "".join(f"{head} {line}\n" for line in text.splitlines())


# From torch 2.13.0; 2.11 and 2.14 differ in line numbers and in how much of a path they keep.
STAMP = "1129 20:41:17.649000 26985 torch/_dynamo"
RECOMPILE = written(
    f"V{STAMP}/guards.py:5396] [0/2] [__recompiles]",
    """\
Recompiling function step in /src/storm.py:2
    triggered by the following guard failure(s):
    - 0/1: len(seen) == 2                # for s in seen:  # rc/storm.py:5 in step
    - User stack trace:
    -   File "/src/storm.py", line 5, in step
    -     for s in seen:
    - 0/0: len(seen) == 1                # for s in seen:  # rc/storm.py:5 in step
""",
)
LIMIT = written(
    f"W{STAMP}/convert_frame.py:1994] [0/8]",
    """\
torch._dynamo hit config.recompile_limit (8)
   function: 'step' (/src/storm.py:2)
   last reason: 0/7: len(seen) == 8
To log all recompilation reasons, use TORCH_LOGS="recompiles".
""",
)
BREAK = written(
    f"V{STAMP}/symbolic_convert.py:5124] [1/0] [__graph_breaks]",
    """\
Graph break in user code at /src/storm.py:13
Graph Break Reason: Encountered graph break when attempting to trace CALL: a function call:

Unsupported Tensor.item() call with capture_scalar_outputs=False
  Explanation: Dynamo does not support tracing `Tensor.item()`.

User code traceback:
""",
)
# As the program's own recorder words it.
BREAK_WORDS = (
    "at storm.py:13: Unsupported Tensor.item() call with capture_scalar_outputs=False: Dynamo does not "
    "support tracing `Tensor.item()`."
)
SKIPPED = written(
    f"V{STAMP}/symbolic_convert.py:5124] [2/0] [__graph_breaks]",
    """\
Graph break in user code at /src/bw.py:16
Graph Break Reason: Failed. Skipping the function and falling back to eager. Graph break encountered:

Observed exception
""",
)
CANNOT_RESUME = written(
    f"V{STAMP}/convert_frame.py:2395] [2/0] [__graph_breaks]",
    """\
Graph break: torch.compile cannot properly resume from this graph break.
  File "/src/bw.py", line 7, in f
""",
)
CUDAGRAPH = written(
    "W1129 20:41:17.649000 26985 torch/_inductor/cudagraph_utils.py:380] [0/0] [__cudagraphs]",
    "skipping cudagraphs due to cpu device (arg0_1). Found from :",
)
RANK = "[rank3]:" + CUDAGRAPH


def parse(text: str) -> list[Event]:
    logs = TorchLogs()
    return [*logs.feed(text.splitlines(), NOW_S), *logs.flush()]


def test_a_recompile_names_function_and_reason() -> None:
    [event] = parse(RECOMPILE)

    assert event.kind == "recompile"
    assert event.text == (
        "`step` (storm.py:2): length of `seen` keeps growing: 1, 2, now another, "
        "which storm.py:5 uses"
    )
    assert time.strftime("%m%d %H:%M:%S", time.localtime(event.time_s)) == "1129 20:41:17"
    assert event.time_s % 1 == pytest.approx(0.649, abs=1e-5)


@pytest.mark.parametrize(
    ("text", "kind", "words"),
    [
        (LIMIT, "recompile_limit", "`step` (storm.py:2): limit of 8 reached"),
        (BREAK, "graph_break", BREAK_WORDS),
        (SKIPPED, "graph_break", "at bw.py:16: Observed exception; the whole function runs uncomp"),
        (CANNOT_RESUME, "graph_break", "at bw.py:7: the whole function runs uncompiled"),
        (CUDAGRAPH, "capture_skip", "skipping cudagraphs due to cpu device (arg0_1)"),
        (
            RANK,
            "capture_skip",
            "skipping cudagraphs due to cpu device (arg0_1). Found from : [rank 3]",
        ),
    ],
)
def test_each_kind_of_record_becomes_an_event(text: str, kind: str, words: str) -> None:
    [event] = parse(text)

    assert event.kind == kind
    assert words in event.text


def test_records_follow_each_other_and_foreign_lines_are_passed_over() -> None:
    text = f"step 1 loss 2.0\n{BREAK}Traceback:\n{RECOMPILE}{RECOMPILE}{LIMIT}"

    kinds = [event.kind for event in parse(text)]

    assert kinds == ["graph_break", "recompile", "recompile", "recompile_limit"]


def test_two_processes_in_one_file_are_kept_apart() -> None:
    other = RECOMPILE.replace(" 26985 ", " 30000 ").replace("step", "other")
    ours, theirs = RECOMPILE.splitlines(), other.splitlines()

    events = parse("\n".join([*ours, *theirs]))

    assert [event.text.split("`")[1] for event in events] == ["step", "other"]


@given(st.lists(st.integers(0, 40), max_size=6))
def test_the_portions_in_which_lines_come_do_not_matter(cuts: list[int]) -> None:
    lines = (BREAK + RECOMPILE + LIMIT + CUDAGRAPH + SKIPPED).splitlines()
    logs, events = TorchLogs(), []
    edges = [0, *sorted(cuts), len(lines)]
    for start, stop in pairwise(edges):
        events += logs.feed(lines[start:stop], NOW_S)
    events += logs.flush()

    assert events == parse("\n".join(lines))


@given(st.lists(st.text(max_size=120)), st.text(max_size=60))
def test_any_text_is_read_without_complaint(lines: list[str], tail: str) -> None:
    head = RECOMPILE.splitlines()[0]

    assert isinstance(parse("\n".join([*lines, head + tail, head[:60] + tail])), list)


def test_the_year_of_a_stamp_is_the_latest_possible() -> None:
    january = time.mktime((2027, 1, 1, 0, 30, 0, 0, 0, -1))

    assert time.localtime(read_time("1231", "23:59:59", "500000", january)).tm_year == 2026
    assert time.localtime(read_time("0101", "00:10:00", "000000", january)).tm_year == 2027
    assert read_time("0230", "00:00:00", "0", january) == january


def test_what_a_log_says_cannot_steer_the_terminal() -> None:
    logs = TorchLogs()
    events = [*logs.feed(RECOMPILE.replace("seen", "\x1b[2J").splitlines(), NOW_S), *logs.flush()]

    assert [event.kind for event in events] == ["recompile"]
    assert events[0].text.isprintable()
