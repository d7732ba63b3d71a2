import json
import time

from hypothesis import given, settings
from hypothesis import strategies as st

from draftline.signal.live.torch_trace import TorchTrace
from draftline.signal.trace import Event

NOW_S = time.mktime((2026, 11, 30, 12, 0, 0, 0, 0, -1))
HEAD = "V1129 20:49:33.000000 29530 torch/_dynamo/guards.py:5400] "


def record(frame: int = 0, **fields: object) -> str:
    return HEAD + json.dumps({**fields, "frame_id": frame, "frame_compile_id": 1, "attempt": 0})


def begin(frame: int = 0) -> list[str]:
    stack = {"stack": [{"line": 3, "name": "loss", "filename": 1}]}
    return [record(frame, str=["/src/bw.py", 1]), record(frame, dynamo_start=stack)]


def metrics(**fields: object) -> str:
    return record(compilation_metrics={"compile_id": "0/0", "duration_us": 2640664, **fields})


def reasons(*texts: str) -> list[str]:
    payload = texts[0] if len(texts) == 1 else json.dumps(texts, indent=0)
    artifact = {"name": "recompile_reasons", "encoding": "json"}
    return [record(artifact=artifact), *(f"\t{line}" for line in payload.splitlines())]


BREAK = [
    record(artifact={"name": "dynamo_graph_break_reason", "encoding": "string"}),
    "\tGraph break in user code at /src/storm.py:13",
    "\tGraph Break Reason: Encountered graph break when attempting to trace CALL: f(x, y):",
    "\t",
    "\tUnsupported Tensor.item() call with capture_scalar_outputs=False",
]


def parse(lines: list[str], **options: bool | str) -> list[Event]:
    trace = TorchTrace(**options)  # type: ignore[arg-type]
    return [*trace.feed(lines, NOW_S), *trace.flush()]


def test_a_compile_has_name_and_seconds() -> None:
    backward = record(bwd_compilation_metrics={"compile_id": "0/0", "duration_us": 703330})

    events = parse([*begin(), metrics(), backward])

    assert [(e.kind, e.text, e.seconds) for e in events] == [
        ("compile", "`loss` (bw.py:3)", 2.640664),
        ("compile", "`loss` (bw.py:3), backward", 0.70333),
    ]


def test_one_reason_comes_with_a_stack_and_several_as_a_list() -> None:
    one = reasons(
        "0/0: len(seen) == 1   # for s in seen:  # a.py:5 in f\nUser stack trace:\n  File"
    )
    two = reasons("0/1: k == 1", "0/0: k == 0\nUser stack trace:\n  File")

    first, second = parse([*one, *begin(), *two, *begin()])

    assert first.text.endswith("length of `seen` changed from 1 to another, which a.py:5 uses")
    assert second.text == "`loss` (bw.py:3): value of `k` keeps growing: 0, 1, now another"


def test_a_reached_limit_is_no_compile() -> None:
    lines = [
        *begin(),
        *reasons("0/2: k == 2"),
        metrics(
            fail_type="Unsupported",
            fail_reason="Dynamo recompile limit exceeded (currently set to 3).",
            recompile_reason="0/2: k == 2",
        ),
        *begin(),
    ]

    [event] = parse(lines)

    assert event.kind == "recompile_limit"
    assert "`loss` (bw.py:3): limit of 3 reached" in event.text
    assert "value of `k`" in event.text
    assert parse(lines, limits=False) == []


def test_graph_breaks_and_refused_captures_are_told() -> None:
    events = parse([*BREAK, *begin(), metrics(cudagraph_skip_reason="skipping: cpu device")])

    assert [e.kind for e in events] == ["graph_break", "compile", "capture_skip"]
    assert events[0].text.startswith("at storm.py:13: Unsupported Tensor.item()")


def test_a_rank_is_named() -> None:
    [event] = parse([*begin(), metrics()], rank="5")

    assert event.text == "`loss` (bw.py:3) [rank 5]"


def test_what_is_being_compiled_is_known_meanwhile() -> None:
    trace = TorchTrace()
    assert list(trace.feed(begin(), NOW_S)) == []
    assert trace.compiling is not None
    assert trace.compiling[0] == "`loss` (bw.py:3)"

    list(trace.feed([metrics()], NOW_S))
    assert trace.compiling is None


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)
NAMES = ("str", "dynamo_start", "artifact", "compilation_metrics", "bwd_compilation_metrics")


@settings(max_examples=40)
@given(st.lists(st.tuples(st.sampled_from(NAMES), JSON, JSON)), st.text(max_size=40))
def test_any_content_is_read_without_complaint(
    records: list[tuple[str, object, object]], tail: str
) -> None:
    lines = []
    for name, value, frame in records:
        lines += [HEAD + json.dumps({name: value, "frame_id": frame}), f"\t{tail}", tail]

    assert isinstance(parse(lines), list)
