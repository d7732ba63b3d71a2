# ruff: noqa: RUF001
"""Exact masks of many families' templates, against text that is written out by hand.

What stands between « and » is what the target says. Each piece is encoded by itself, so the ids are
those of the prompt alone followed by those of the answer, whatever the template does.
"""

from __future__ import annotations

import datetime
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from draftline.data.conversations import Conversation, Message, ToolCall
from draftline.data.dates import pinned, writes_date
from draftline.data.tokens import Tokenized, tokenize
from tests.support.chat_families import FAMILIES, TEMPLATES, stop_ids_of, tokenizer_of

DAY = datetime.date(2026, 3, 30)
LOOK = {"type": "function", "function": {"name": "look", "description": "d", "parameters": {}}}
TOOLS = json.dumps([LOOK])
CALL = ToolCall("look", '{"at": "six"}', "abc")
Q, A, Q2, A2, S = "Add two and three.", "Five.", "And six?", "Eleven.", "Be brief."


def talk(*turns: Any, system: str = "") -> tuple[Message, ...]:
    """Turns of user and assistant in turn, as texts or whole messages."""
    roles = itertools.cycle(("user", "assistant"))
    said = [t if isinstance(t, Message) else Message(next(roles), t) for t in turns]
    return (*[Message("system", system)] * bool(system), *said)


def run(
    family: str,
    messages: Sequence[Message],
    arguments: Mapping[str, Any],
    complete: bool = True,
    tools: str = "",
) -> Tokenized:
    conversation = Conversation("c", tuple(messages), "f:1", complete, tools=tools)
    return tokenize(
        [conversation],
        tokenizer_of(family),
        max_length=4000,
        block_size=2,
        template_kwargs=pinned(arguments, DAY),
        stop_ids=stop_ids_of(family),
    )


def by_hand(family: str, text: str) -> tuple[list[int], list[bool]]:
    tokenizer = tokenizer_of(family)
    ids: list[int] = []
    mask: list[bool] = []
    for piece in re.split("(«.*?»)", text, flags=re.DOTALL):
        found = tokenizer(piece.strip("«»"), add_special_tokens=False)["input_ids"]
        ids += found
        mask += [piece.startswith("«")] * len(found)
    return ids, mask


IM = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
SYS = "<|im_start|>system\n{}<|im_end|>\n"
THINK = "<think>\ntwo, three\n</think>\n\n"
CUT = "<think>\ntwo, th"
OFF = {"enable_thinking": False}
IM_END = "<|im_end|>"
CALLED = Message("assistant", "", tool_calls=(CALL,))
RESULT = Message("tool", "6", name="look", tool_call_id="abc")
USED = (Message("user", Q), CALLED, RESULT, Message("assistant", A))
LL = "<|start_header_id|>{}<|end_header_id|>\n\n"
LLS = "<|begin|>" + LL.format("system") + "Today Date: 30 Mar 2026\n\n"
LLU = LL.format("user") + Q + "<|eot_id|>" + LL.format("assistant")
GEM = "<start_of_turn>user\n{}<end_of_turn>\n<start_of_turn>model\n"
G4 = "<|turn>user\n{}<turn|>\n<|turn>model\n"
G4_OFF = "<|channel>thought\n<channel|>"
G4_THINK = "<|channel>thought\ntwo, three<channel|>"
PHI = "<|im_start|>user<|im_sep|>{}<|im_end|><|im_start|>assistant<|im_sep|>"
OSS = "<|start|>system<|message|>Current date: 2026-03-30<|end|>"
OSS_U = "<|start|>user<|message|>{}<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>"
OSS_THINK = "<|channel|>analysis<|message|>two, three<|end|><|start|>assistant" + FINAL
SM = "<|im_start|>system\nToday Date: 30 March 2026\nReasoning Mode: {}\n{}<|im_end|>\n"
GR = "<|start_of_role|>{}<|end_of_role|>{}<|end_of_text|>\n"
GR_A = "<|start_of_role|>assistant<|end_of_role|>"
GR_D = GR.format("system", "Today's Date: March 30, 2026.")
CR = "<|START_OF_TURN_TOKEN|><|{}_TOKEN|>{}<|END_OF_TURN_TOKEN|>"
CR_A = "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>"
CR_END = "<|END_RESPONSE|><|END_OF_TURN_TOKEN|>"
OL = "<|user|>\n{}\n<|assistant|>\n"
DS = "<｜User｜>{}<｜Assistant｜>"
EOS = "<｜end▁of▁sentence｜>"
NE = "<SPECIAL_10>System\n{}\n\n<SPECIAL_11>User\n{}\n<SPECIAL_11>Assistant\n"
GL = "<|user|>\n{}<|assistant|>"
TWO = (Q, A, Q2, A2)
THOUGHT = "two, three\n</think>\n\n"

# Family, what is shown, template arguments, turns, whether whole, tools, the samples by hand.
CASES: list[tuple[str, str, dict[str, Any], tuple[Message, ...], bool, str, list[str]]] = [
    ("qwen3", "thinking", {}, talk(Q, THINK + A), True, "", [IM.format(Q) + f"«{THINK}{A}{IM_END}»\n"]),
    ("qwen3", "thinking cut", {}, talk(Q, CUT), False, "", [IM.format(Q) + f"«{CUT}»"]),
    ("qwen3", "thinking as a field", {}, (Message("user", Q), Message("assistant", A, "two, three")),
     True, "", [IM.format(Q) + f"«{THINK}{A}{IM_END}»\n"]),
    ("qwen3", "no thought though it may", {}, talk(Q, A), True, "", [IM.format(Q) + f"«{A}{IM_END}»"]),
    ("qwen3", "off", OFF, talk(Q, A, system=S), True, "",
     [SYS.format(S) + IM.format(Q) + f"<think>\n\n</think>\n\n«{A}{IM_END}»\n"]),
    ("qwen3", "off and cut", OFF, talk(Q, A), False, "",
     [IM.format(Q) + f"<think>\n\n</think>\n\n«{A}»"]),
    ("qwen3", "off, turns", OFF, talk(*TWO), True, "",
     [IM.format(Q) + f"<think>\n\n</think>\n\n«{A}{IM_END}»\n",
      IM.format(Q) + f"{A}{IM_END}\n" + IM.format(Q2) + f"<think>\n\n</think>\n\n«{A2}{IM_END}»\n"]),
    ("qwen3", "thinking, turns", {}, talk(Q, THINK + A, Q2, THINK + A2), True, "",
     [IM.format(Q) + f"«{THINK}{A}{IM_END}»\n",
      IM.format(Q) + f"{A}{IM_END}\n" + IM.format(Q2) + f"«{THINK}{A2}{IM_END}»\n"]),
    ("qwen3", "tools", OFF, USED, True, TOOLS,
     [SYS.format("# Tools\n" + TOOLS[1:-1] + "\n") + IM.format(Q) + "<think>\n\n</think>\n\n"
      + '«<tool_call>\n{"name": "look", "arguments": {"at": "six"}}\n</tool_call><|im_end|>»\n',
      SYS.format("# Tools\n" + TOOLS[1:-1] + "\n") + IM.format(Q)
      + '<tool_call>\n{"name": "look", "arguments": {"at": "six"}}\n</tool_call><|im_end|>\n'
      + IM.format("<tool_response>\n6\n</tool_response>")
      + f"<think>\n\n</think>\n\n«{A}{IM_END}»\n"]),
    ("llama3", "turns, system", {}, talk(*TWO, system=S), True, "",
     [LLS + S + "<|eot_id|>" + LLU + f"«{A}<|eot_id|>»" + LL.format("user") + Q2 + "<|eot_id|>"
      + LL.format("assistant") + f"«{A2}<|eot_id|>»"]),
    ("llama3", "cut", {}, talk(Q, A), False, "", [LLS + "<|eot_id|>" + LLU + f"«{A}»"]),
    ("llama3", "space around", {}, talk(Q, f" {A}\n"), True, "",
     [LLS + "<|eot_id|>" + LLU + f"« {A}\n<|eot_id|>»"]),
    ("llama3", "tools", {}, USED, True, TOOLS,
     [LLS + "<|eot_id|>" + LL.format("user") + "Use these: " + TOOLS[1:-1] + "\n\n" + Q + "<|eot_id|>"
      + LL.format("assistant") + '«{"name": "look", "parameters": {"at": "six"}}<|eot_id|>»'
      + LL.format("ipython") + '"6"<|eot_id|>' + LL.format("assistant") + f"«{A}<|eot_id|>»"]),
    ("gemma3", "turns, system", {}, talk(*TWO, system=S), True, "",
     ["<bos>" + GEM.format(f"{S}\n\n{Q}") + f"«{A}<end_of_turn>»\n" + GEM.format(Q2)
      + f"«{A2}<end_of_turn>»\n"]),
    ("gemma3", "cut", {}, talk(Q, A), False, "", ["<bos>" + GEM.format(Q) + f"«{A}»"]),
    ("gemma4", "off, turns", {}, talk(*TWO), True, "",
     ["<bos>" + G4.format(Q) + G4_OFF + f"«{A}<turn|>»",
      "<bos>" + G4.format(Q) + f"{A}<turn|>\n" + G4.format(Q2) + G4_OFF + f"«{A2}<turn|>»"]),
    ("gemma4", "off and cut", {}, talk(Q, A), False, "", ["<bos>" + G4.format(Q) + G4_OFF + f"«{A}»"]),
    ("gemma4", "thinking, system", {"enable_thinking": True}, talk(Q, G4_THINK + A, system=S), True, "",
     [f"<bos><|turn>system\n<|think|>{S}<turn|>\n" + G4.format(Q) + f"«{G4_THINK}{A}<turn|>»"]),
    ("gemma4", "thinking cut", {"enable_thinking": True}, talk(Q, G4_THINK[:20]), False, "",
     ["<bos><|turn>system\n<|think|><turn|>\n" + G4.format(Q) + f"«{G4_THINK[:20]}»"]),
    ("gemma4", "tools", {}, USED[:2], True, TOOLS,
     ["<bos><|turn>system\n<|tool>declaration:look<tool|><turn|>\n" + G4.format(Q) + G4_OFF
      + '«<|tool_call>call:look{at:<|"|>six<|"|>}<tool_call|><turn|>»']),
    ("phi4", "turns, system", {}, talk(*TWO, system=S), True, "",
     [f"<|im_start|>system<|im_sep|>{S}<|im_end|>" + PHI.format(Q) + f"«{A}{IM_END}»" + PHI.format(Q2)
      + f"«{A2}{IM_END}»"]),
    ("phi4", "cut", {}, talk(Q, A), False, "", [PHI.format(Q) + f"«{A}»"]),
    ("gpt_oss", "no thought, turns", {}, talk(*TWO, system=S), True, "",
     [OSS + f"<|start|>developer<|message|>{S}<|end|>" + OSS_U.format(Q) + f"«{FINAL}{A}<|return|>»",
      OSS + f"<|start|>developer<|message|>{S}<|end|>" + OSS_U.format(Q) + f"{FINAL}{A}<|end|>"
      + OSS_U.format(Q2) + f"«{FINAL}{A2}<|return|>»"]),
    ("gpt_oss", "thinking as a field", {}, (Message("user", Q), Message("assistant", A, "two, three")),
     True, "", [OSS + OSS_U.format(Q) + f"«{OSS_THINK}{A}<|return|>»"]),
    ("gpt_oss", "thinking as text, which it refuses", {}, talk(Q, OSS_THINK + A), True, "",
     [OSS + OSS_U.format(Q) + f"«{OSS_THINK}{A}<|return|>»"]),
    ("gpt_oss", "thinking cut", {}, talk(Q, OSS_THINK[:38]), False, "",
     [OSS + OSS_U.format(Q) + f"«{OSS_THINK[:38]}»"]),
    ("gpt_oss", "tools", {}, USED, True, TOOLS,
     [OSS + "<|start|>developer<|message|>type look = any;<|end|>" + OSS_U.format(Q)
      + '« to=functions.look<|channel|>commentary json<|message|>{"at": "six"}<|call|>»'
      + '<|start|>functions.look to=assistant<|channel|>commentary<|message|>"6"<|end|>'
      + f"<|start|>assistant«{FINAL}{A}<|return|>»"]),
    ("smollm3", "thinking, turns", {}, talk(Q, THINK + A, Q2, THINK + A2, system=S), True, "",
     [SM.format("/think", S) + IM.format(Q) + f"«{THINK}{A}{IM_END}»\n" + IM.format(Q2)
      + f"«{THINK}{A2}{IM_END}»\n"]),
    ("smollm3", "thinking cut", {}, talk(Q, CUT), False, "",
     [SM.format("/think", "") + IM.format(Q) + f"«{CUT}»"]),
    ("smollm3", "off, turns", OFF, talk(*TWO), True, "",
     [SM.format("/no_think", "") + IM.format(Q) + f"<think>\n\n</think>\n«{A}{IM_END}»\n"
      + IM.format(Q2) + f"<think>\n\n</think>\n«{A2}{IM_END}»\n"]),
    ("granite", "turns", {}, talk(*TWO), True, "",
     [GR_D + GR.format("user", Q) + GR_A + f"«{A}<|end_of_text|>»\n" + GR.format("user", Q2) + GR_A
      + f"«{A2}<|end_of_text|>»\n"]),
    ("granite", "thinking, system, cut", {"thinking": True}, talk(Q, "two, th", system=S), False, "",
     [GR.format("system", S + " Think first.") + GR.format("user", Q) + GR_A + "«two, th»"]),
    ("granite", "tools", {}, USED[:2], True, TOOLS,
     [GR_D + GR.format("available_tools", TOOLS) + GR.format("user", Q) + GR_A
      + '«<|tool_call|>[{"name": "look", "arguments": {"at": "six"}}]<|end_of_text|>»\n']),
    ("command_r", "turns, system", {}, talk(*TWO, system=S), True, "",
     ["<BOS>" + CR.format("SYSTEM", S) + CR.format("USER", Q) + CR_A
      + f"«<|START_RESPONSE|>{A}{CR_END}»" + CR.format("USER", Q2) + CR_A
      + f"«<|START_RESPONSE|>{A2}{CR_END}»" + CR_A]),
    ("command_r", "cut", {}, talk(Q, A), False, "",
     ["<BOS>" + CR.format("USER", Q) + CR_A + f"«<|START_RESPONSE|>{A}»"]),
    ("command_r", "tools", {},
     (Message("user", Q), Message("assistant", "", "two", (CALL,))), True, TOOLS,
     ["<BOS>" + CR.format("USER", Q + " look") + CR_A
      + '«<|START_THINKING|>two<|END_THINKING|><|START_ACTION|>[{"tool_name": "look", '
      '"parameters": {"at": "six"}}]<|END_ACTION|><|END_OF_TURN_TOKEN|>»' + CR_A]),
    ("olmo2", "turns, system", {}, talk(*TWO, system=S), True, "",
     [f"<|endoftext|><|system|>\n{S}\n" + OL.format(Q) + f"«{A}<|endoftext|>»\n" + OL.format(Q2)
      + f"«{A2}<|endoftext|>»"]),
    ("olmo2", "cut", {}, talk(Q, A), False, "", ["<|endoftext|>" + OL.format(Q) + f"«{A}»"]),
    ("mistral", "turns", {}, talk(*TWO), True, "",
     [f"<s>[INST] {Q}[/INST]« {A}</s>»[INST] {Q2}[/INST]« {A2}</s>»"]),
    # The system prompt moves to the last question, so the first answer has another history.
    ("mistral", "turns, system", {}, talk(*TWO, system=S), True, "",
     [f"<s>[INST] {S}\n\n{Q}[/INST]« {A}</s>»",
      f"<s>[INST] {Q}[/INST] {A}</s>[INST] {S}\n\n{Q2}[/INST]« {A2}</s>»"]),
    ("mistral", "cut", {}, talk(Q, A), False, "", [f"<s>[INST] {Q}[/INST]« {A}»"]),
    ("glm4", "thinking", {}, talk(Q, "<think>two</think>\n" + A, system=S), True, "",
     [f"[gMASK]<sop><|system|>\n{S}" + GL.format(Q) + f"«\n<think>two</think>\n{A}<|user|>»"]),
    ("glm4", "off, turns", OFF, talk(*TWO), True, "",
     ["[gMASK]<sop>" + GL.format(Q + "/nothink") + f"\n<think></think>«\n{A}<|user|>»\n{Q2}/nothink"
      f"<|assistant|>\n<think></think>«\n{A2}<|user|>»"]),
    ("glm4", "thinking cut", {}, talk(Q, "\n<think>two, th"), False, "",
     ["[gMASK]<sop>" + GL.format(Q) + "«\n<think>two, th»"]),
    ("glm4", "tools", OFF, USED, True, TOOLS,
     ["[gMASK]<sop><|system|>\n# Tools\n" + TOOLS[1:-1] + GL.format(Q + "/nothink")
      + "\n<think></think>«\n<tool_call>look\n<arg_key>at</arg_key>\n<arg_value>six</arg_value>\n"
      f"</tool_call><|observation|>»\n<tool_response>\n6\n</tool_response><|assistant|>\n"
      f"<think></think>«\n{A}<|user|>»"]),
    ("deepseek_r1", "thinking, turns", {}, talk(Q, THOUGHT + A, Q2, THINK + A2, system=S), True, "",
     [f"<｜begin｜>{S}" + DS.format(Q) + f"<think>\n«{THOUGHT}{A}{EOS}»",
      f"<｜begin｜>{S}" + DS.format(Q) + f"\n\n{A}{EOS}" + DS.format(Q2)
      + f"<think>\n«{THOUGHT}{A2}{EOS}»"]),
    ("deepseek_r1", "thinking cut", {}, talk(Q, "two, th"), False, "",
     ["<｜begin｜>" + DS.format(Q) + "<think>\n«two, th»"]),
    ("qwq", "thinking, turns", {}, talk(Q, THINK + A, Q2, THOUGHT + A2, system=S), True, "",
     [SYS.format(S) + IM.format(Q) + f"<think>\n«{THOUGHT}{A}{IM_END}»",
      SYS.format(S) + IM.format(Q) + f"{A}{IM_END}\n" + IM.format(Q2)
      + f"<think>\n«{THOUGHT}{A2}{IM_END}»"]),
    ("qwq", "thinking cut", {}, talk(Q, CUT), False, "", [IM.format(Q) + "<think>\n«two, th»"]),
    ("nemotron", "thinking, turns", {}, talk(Q, "two</think>" + A, Q2, "three</think>" + A2), True, "",
     [NE.format("", Q) + f"<think>\n\n«two</think>{A}\n<SPECIAL_12>»\n\n",
      NE.format("", Q) + f"{A}\n<SPECIAL_12>\n\n<SPECIAL_11>User\n{Q2}\n<SPECIAL_11>Assistant\n"
      + f"<think>\n\n«three</think>{A2}\n<SPECIAL_12>»\n\n"]),
    ("nemotron", "thinking cut", {}, talk(Q, "two, th"), False, "",
     [NE.format("", Q) + "<think>\n\n«two, th»"]),
    ("nemotron", "off, system", {}, talk(Q, A, system=f"{S} /no_think"), True, "",
     [NE.format(S, Q) + f"<think></think>«{A}\n<SPECIAL_12>»\n\n"]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("family", "arguments", "messages", "complete", "tools", "expected"),
    [pytest.param(c[0], *c[2:], id=f"{c[0]}: {c[1]}") for c in CASES],
)
def test_masks_are_those_written_by_hand(
    family: str,
    arguments: dict[str, Any],
    messages: tuple[Message, ...],
    complete: bool,
    tools: str,
    expected: list[str],
) -> None:
    done = run(family, messages, arguments, complete, tools)
    assert not done.rejects
    decode = tokenizer_of(family).decode
    for sample, text in zip(done.samples, expected, strict=True):
        ids, mask = by_hand(family, text)
        said = [i for i, flag in zip(sample.input_ids, sample.loss_mask, strict=True) if flag]
        assert decode(said) == decode([i for i, flag in zip(ids, mask, strict=True) if flag])
        assert sample.input_ids.tolist() == ids
        assert sample.loss_mask.tolist() == mask
        assert sample.truncated is not complete


def test_every_family_is_shown_whole_cut_and_in_turns() -> None:
    assert {path.stem for path in TEMPLATES.glob("*.jinja")} == set(FAMILIES)
    for family in FAMILIES:
        mine = [case for case in CASES if case[0] == family]
        assert {case[4] for case in mine} == {True, False}, family
        assert any(sum(m.role == "user" for m in case[3]) > 1 for case in mine) or family == "glm4"
    assert len(FAMILIES) >= 12


@pytest.mark.parametrize(
    ("family", "arguments", "messages", "reason"),
    [
        ("qwq", {}, talk(Q, A), "template_not_prefix"),
        ("deepseek_r1", {}, talk(Q, A), "template_not_prefix"),
        ("nemotron", {}, talk(Q, A), "template_not_prefix"),
        ("qwen3", OFF, talk(Q, THINK + A), "template_not_prefix"),
        ("gemma4", {}, talk(Q, G4_THINK + A), "template_not_prefix"),
        ("qwq", {}, (Message("user", Q), Message("assistant", A, "two")), "template_not_prefix"),
        ("gemma3", {}, (Message("user", Q), Message("assistant", A, "two")), "reasoning_not_in_template"),
        ("phi4", {}, (Message("user", Q), CALLED), "tool_calls_not_in_template"),
        ("deepseek_r1", {}, (Message("user", Q), CALLED), "template_not_prefix"),
    ],
)  # fmt: skip
def test_an_answer_that_serving_would_not_show_is_left_out_by_name(
    family: str, arguments: dict[str, Any], messages: tuple[Message, ...], reason: str
) -> None:
    good = {"qwq": THINK + A, "deepseek_r1": THINK + A, "nemotron": THINK + A}.get(family, A)
    kept = Conversation("good", talk(Q2, good), "f:2")
    bad = Conversation("bad", messages, "f:1")
    done = tokenize(
        [bad, kept],
        tokenizer_of(family),
        max_length=4000,
        block_size=2,
        template_kwargs=pinned(arguments, DAY),
        stop_ids=stop_ids_of(family),
    )
    assert [sample.id for sample in done.samples] == ["good"]
    assert [(reject.id, reject.reason) for reject in done.rejects] == [("bad", reason)]


def test_templates_that_write_the_date_are_found() -> None:
    dated = {name for name in FAMILIES if writes_date(tokenizer_of(name), {})}
    assert dated == {"llama3", "gpt_oss", "smollm3", "granite"}
    assert not writes_date(tokenizer_of("llama3"), {"date_string": "1 Jan 2020"})
