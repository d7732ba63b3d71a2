import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftline.signal.guards import describe, describe_break, is_limit, name_function

# As torch 2.11 to 2.14 write them.
REASONS = [
    (
        "0/0: k == 0      # return x * k  # src/kinds.py:9 in f",
        "value of `k` changed from 0 to another, which kinds.py:9 uses",
    ),
    (
        "2/1: L['k'] == 'b'  # x  # /home/a b/kinds.py:15 in f",
        "value of `k` changed from 'b' to another",
    ),
    ("0/0: G['scale'] == 1.0", "value of `scale` changed from 1.0 to another"),
    ("0/0: not items", "`items` is no longer empty or zero"),
    ("0/0: items", "`items` became empty or zero"),
    ("0/0: L['mask'] is None", "`mask` is no longer None"),
    ("0/0: mask is not None", "`mask` became None"),
    ("3/0: ___dict_contains('a', L['d'])", "`d` no longer has the key 'a'"),
    ("3/0: not ___dict_contains('a', d)", "`d` now has the key 'a'"),
    ("6/0: len(items) == 1", "length of `items` changed from 1 to another"),
    ("7/0: len(table) != 3", "length of `table` changed from 3 to another"),
    (
        "8/0: tensor 'x' size mismatch at index 0. expected 3, actual 4",
        "size of `x` in dimension 0 changed from 3 to 4",
    ),
    (
        "13/0: tensor 'x' stride mismatch at index 1. expected 4, actual 1",
        "stride of `x` in dimension 1 changed from 4 to 1",
    ),
    (
        "10/0: tensor 'x' rank mismatch. expected 1, actual 2",
        "number of dimensions of `x` changed from 1 to 2",
    ),
    (
        "11/0: tensor 'x' dtype mismatch. expected Float, actual Half",
        "dtype of `x` changed from float32 to float16",
    ),
    (
        "12/0: tensor 'x' requires_grad mismatch. expected requires_grad=0",
        "requires_grad of `x` changed from False to True",
    ),
    (
        "1/0: tensor 'x' Tensor device index mismatch. Expected device index to be 0, actual 1",
        "device of `x` changed from 0 to 1",
    ),
    ("14/0: GLOBAL_STATE changed: grad_mode ", "a global setting changed: grad mode"),
    (
        "19/1: ___check_type_id(k, 139853866291712), type=<class 'float'>",
        "type of `k` changed from float to another",
    ),
    (
        "22/1: 2 <= x.size()[0] <= 6  # if x.shape[0] > 6  # k.py:71 in f",
        "size of `x` in dimension 0 left what was compiled, 2 to 6, which k.py:71 uses",
    ),
    ("9/1: 2 <= x.size()[0]", "size of `x` in dimension 0 left what was compiled, 2 or more"),
    (
        "21/1: y.size()[0] == x.size()[0]  # (unknown var s17, please file a bug)",
        "a guard no longer holds: y.size()[0] == x.size()[0]",
    ),
    (
        "22/1: 2 <= x.size()[0] <= 6  # x  # _dynamo/variables/tensor.py:1951 in g",
        "size of `x` in dimension 0 left what was compiled, 2 to 6",
    ),
]


@pytest.mark.parametrize(("reason", "words"), REASONS)
def test_a_guard_is_told_in_words(reason: str, words: str) -> None:
    assert describe([reason]) == words


def test_the_way_of_a_value_is_told_oldest_first() -> None:
    growing = ["0/2: len(seen) == 3", "0/1: len(seen) == 2", "0/0: len(seen) == 1"]
    falling = [
        "0/1: tensor 'x' size mismatch at index 0. expected 7, actual 5",
        "0/0: tensor 'x' size mismatch at index 0. expected 9, actual 5",
    ]
    changing = ["0/1: k == 'b'", "0/0: k == 'a'"]

    assert describe(growing) == "length of `seen` keeps growing: 1, 2, 3, now another"
    assert describe(falling) == "size of `x` in dimension 0 keeps falling: 9, 7, now 5"
    assert describe(changing) == "value of `k` keeps changing: 'a', 'b', now another"


def test_a_long_way_is_cut_and_other_guards_are_left_out() -> None:
    reasons = [f"0/{n}: k == {n}" for n in reversed(range(9))]
    reasons.insert(1, "0/9: len(seen) == 4")

    assert describe(reasons) == "value of `k` keeps growing: ..., 5, 6, 7, 8, now another"


def test_without_a_reason_none_is_invented() -> None:
    assert describe([]) == "no reason is given"


def test_the_rest_of_a_function_after_a_graph_break_has_its_name() -> None:
    assert name_function("torch_dynamo_resume_in_loss_at_13") == "loss after line 13"
    assert name_function("loss") == "loss"


@given(st.lists(st.text(max_size=200), max_size=5))
def test_any_text_is_described_in_one_piece(reasons: list[str]) -> None:
    assert describe(reasons)


def test_a_stack_below_a_reason_says_nothing_more() -> None:
    stack = 'User stack trace:\n  File "a.py", line 3, in f'
    assert describe([f"0/0: k == 0\n{stack}"]) == "value of `k` changed from 0 to another"
    tensor = "0/0: tensor 'x' size mismatch at index 0. expected 3, actual 4"
    assert describe([f"{tensor}\n{stack}"]) == describe([tensor])


def test_a_break_is_told_without_hints_and_links() -> None:
    told = (
        "Unsupported call\n  Explanation: print cannot be traced\n  Hint: remove it\n\n  see x.org"
    )
    assert describe_break(told) == "Unsupported call: print cannot be traced"
    assert describe_break("plain\n\nmore") == "plain"


def test_only_the_recompile_limit_is_one() -> None:
    assert is_limit("recompile limit reached with fullgraph=True")
    assert not is_limit("Unsupported: call")
