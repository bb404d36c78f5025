"""Messages become the prompt that the checkpoint's chat template writes, or their row's error."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from prompt_specs import spec_of

from actors.engine.errors import UserError
from actors.engine.model.tokenizer import load_tokenizer
from actors.engine.types import SamplingParams
from actors.requests import RequestBuilder
from pipeline.config.job import JobConfig
from pipeline.job import run
from pipeline.prepare.chat import Chat, check_chat, checked_tools, read_messages, render_chat
from pipeline.prepare.prompts import ERROR, PROMPT_IDS, prepare_table
from pipeline.prepare.templates import compile_template, template_columns

USER = [{"role": "user", "content": "hi"}]
IN_TEXT = [
    {"role": role, "content": text}
    for role, text in (("system", "be nice"), ("user", "who?"), ("assistant", "yes?"), ("user", "name[Zizzi]pub"))
]
IN_PARTS = [{**one, "content": [{"type": "text", "text": one["content"]}]} for one in IN_TEXT[:3]]
IN_PARTS += [{"role": "user", "content": [{"type": "text", "text": text} for text in ("name[Zizzi]", "pub")]}]
EACH_PART = "{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}"
OF_PARTS = [
    f"<s>{{% for m in messages %}}[{{{{ m.role }}}}]{EACH_PART}{{% endfor %}}"
    "{% if add_generation_prompt %}[a]{% endif %}",
    "<s>{% for m in messages %}[{{ m.role }}]{{ m.content[0].text }}"
    "{% for part in m.content[1:] %}{{ part['text'] }}{% endfor %}{% endfor %}",
    "<s>{% if messages[0].role == 'system' %}{{ messages[0].content[0].text }}{% endif %}"
    f"{{% for m in messages if m.role != 'system' %}}[{{{{ m.role }}}}]{EACH_PART}{{% endfor %}}",
]
OF_BOTH = (
    "<s>{% for m in messages %}[{{ m.role }}]{% if m.content is string %}{{ m.content | trim }}{% else %}"
    f"{EACH_PART}{{% endif %}}{{% endfor %}}"
)
BUILDER: Any = {
    **{"sampling": SamplingParams(), "choices": None, "output_format": None},
    **{"seed": 0, "strip": True, "vocab_size": 300, "stop_ids": [2]},
}


def reference(tokenizer: Any, chat: list[dict[str, Any]]) -> str:
    return str(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True))


def ids_of(tokenizer: Any, chat: list[dict[str, Any]]) -> list[int]:
    ids: list[int] = tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
    return ids


def prepared(checkpoint: Path, given: Any, **section: Any) -> tuple[list[Any], list[Any]]:
    """Prompts as text, special tokens shown, and errors. given: an Arrow array, or values for one."""
    spec = spec_of(checkpoint, 200, params=SamplingParams(max_new_tokens=10), **{"messages": "m", **section})
    done = prepare_table(pa.table({"m": given}), spec)
    texts = load_tokenizer(checkpoint).batch_decode(done[PROMPT_IDS].to_pylist())
    return [text.replace("> ", ">") for text in texts], done[ERROR].to_pylist()


def test_a_chat_goes_through_the_checkpoints_template(chat_checkpoint: Path) -> None:
    """As it is, or as JSON. The tokenizer puts <s> and <sep> around plain text; a chat has what its template writes."""
    chat = [{"role": "system", "content": "be nice"}, *USER, {"role": "assistant", "content": "yes?"}, *USER]
    texts, errors = prepared(chat_checkpoint, [chat, USER])
    assert errors == [None, None]
    assert prepared(chat_checkpoint, [json.dumps(chat), json.dumps(USER)]) == (texts, errors)
    [ids] = prepare_table(pa.table({"m": [USER]}), spec_of(chat_checkpoint, messages="m"))[PROMPT_IDS].to_pylist()
    assert ids == load_tokenizer(chat_checkpoint).apply_chat_template(USER, add_generation_prompt=True)["input_ids"]
    assert texts == [
        "<s>[system]be nice</s>[user]hi</s>[assistant]yes?</s>[user]hi</s>[assistant]",
        "<s>[user]hi</s>[assistant]",
    ]


def test_text_parts_become_lines_and_null_fields_are_dropped(chat_checkpoint: Path) -> None:
    parts = [{"type": "text", "text": "one", "image": None}, {"type": "text", "text": "two", "image": None}]
    messages = [[{"role": "user", "name": None, "content": parts}], [{"role": "user", "name": "Ann", "content": parts}]]
    texts, errors = prepared(chat_checkpoint, messages)
    assert errors == [None, None]
    assert texts == ["<s>[user]one\ntwo</s>[assistant]", "<s>[user]one\ntwo(Ann)</s>[assistant]"]


def test_a_list_of_parts_stays_one_if_the_template_writes_it(chat_checkpoint: Path) -> None:
    """Parts were joined by a line feed that Gemma 3's template does not write."""
    tokenizer = load_tokenizer(chat_checkpoint)
    tokenizer.chat_template = OF_BOTH
    for chat in (IN_TEXT, IN_PARTS, [*IN_PARTS[:2], *IN_TEXT[2:]]):
        assert render_chat(tokenizer, Chat(), read_messages(chat))[0] == reference(tokenizer, chat)
        assert RequestBuilder(tokenizer, **BUILDER).prompt(chat).ids == ids_of(tokenizer, chat)


@pytest.mark.parametrize("template", OF_PARTS)
def test_a_template_that_writes_only_parts_loses_no_text(chat_checkpoint: Path, template: str) -> None:
    """Llama Guard 3's reads letters instead, and every row had the same prompt."""
    tokenizer = load_tokenizer(chat_checkpoint)
    tokenizer.chat_template = template
    expected = reference(tokenizer, IN_PARTS)
    assert all(text in expected for text in ("be nice", "yes?", "who?", "Zizzi"))
    check_chat(tokenizer, Chat(), "model")
    for chat in (IN_PARTS, [*IN_TEXT[:3], IN_PARTS[3]]):
        assert render_chat(tokenizer, Chat(), read_messages(chat))[0] == expected
        assert RequestBuilder(tokenizer, **BUILDER).prompt(chat).ids == ids_of(tokenizer, IN_PARTS)
    of_job = Chat("be nice", (("who?", "yes?"),))
    check_chat(tokenizer, of_job, "model")
    assert render_chat(tokenizer, of_job, read_messages(IN_PARTS[3:]))[0] == expected
    begun = [*IN_TEXT[:2], {"role": "assistant", "content": [{"type": "text", "text": "It is"}]}]
    assert render_chat(tokenizer, Chat(continue_final=True), begun)[0].endswith("It is")


@pytest.mark.parametrize("of_text", ["", "m.content if m.content is string else "])
def test_a_template_that_writes_only_the_first_part_gets_all_parts_in_one(chat_checkpoint: Path, of_text: str) -> None:
    """Mistral's is one, for messages of the system and the assistant."""
    tokenizer = load_tokenizer(chat_checkpoint)
    tokenizer.chat_template = f"{{% for m in messages %}}[{{{{ {of_text}m.content[0].text }}}}]{{% endfor %}}"
    expected = "[be nice][who?][yes?][name[Zizzi]\npub]"
    assert render_chat(tokenizer, Chat(), read_messages(IN_PARTS))[0] == expected
    tool = {"role": "tool", "content": [{"type": "text", "text": text} for text in ("a", "b")]}
    assert render_chat(tokenizer, Chat(), read_messages([*IN_TEXT[:2], tool]))[0] == "[be nice][who?][a\nb]"
    with_image = [{"role": "user", "content": [{"type": "image"}, IN_PARTS[0]["content"][0]]}]  # as the template has it
    assert RequestBuilder(tokenizer, **BUILDER).prompt(with_image).ids == ids_of(tokenizer, with_image)


@pytest.mark.parametrize(
    ("template", "chat", "role"),
    [
        ("{{ bos_token }}[user][assistant]", Chat(), "user"),
        ("{{ messages[-1].content.text }}", Chat(), "user"),
        ("{{ messages[-1].content }}", Chat("be nice"), "system"),
        ("{{ messages[-1].content }}", Chat(examples=(("a", "b"),)), "assistant"),
        ("{% for m in messages if m.role != 'assistant' %}{{ m.content }}{% endfor %}", Chat(None, (("a", "b"),)), "a"),
        ("{% for m in messages[-3:] %}{{ m.content }}{% endfor %}", Chat(examples=(("a", "b"),) * 2), "user"),
    ],
)
def test_a_template_that_leaves_out_a_text_of_the_job_is_refused(
    chat_checkpoint: Path, template: str, chat: Chat, role: str
) -> None:
    tokenizer = load_tokenizer(chat_checkpoint)
    tokenizer.chat_template = template
    with pytest.raises(UserError, match=f"^model: the chat template leaves out the text of messages of role {role}"):
        check_chat(tokenizer, chat, "model")
    if role == "user" and not chat.examples:
        assert "leaves out" in str(RequestBuilder(tokenizer, **BUILDER).prompt(USER).error)


def test_a_rows_message_that_the_template_leaves_out_is_its_error(chat_checkpoint: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(chat_checkpoint, tmp_path / "copy"))
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages if m.role != 'system' %}{{ m.content }}{% endfor %}"
    )
    texts, errors = prepared(folder, [USER, [{"role": "system", "content": "be nice"}, *USER]])
    assert texts[0].strip() == "hi"
    assert errors == [None, "the chat template leaves out the text of messages of role system"]


def test_the_jobs_system_message_and_examples_come_first(chat_checkpoint: Path) -> None:
    examples = [{"user": "a", "assistant": "b"}, {"user": "c", "assistant": "d"}]
    rude = {"role": "system", "content": "be rude"}
    texts, errors = prepared(chat_checkpoint, [USER, [rude, *USER], [*USER, rude]], system="be nice", examples=examples)
    shots = "[user]a</s>[assistant]b</s>[user]c</s>[assistant]d</s>[user]hi</s>"
    assert errors == [None] * 3
    assert texts == [
        f"<s>[system]be nice</s>{shots}[assistant]",
        f"<s>[system]be rude</s>{shots}[assistant]",
        f"<s>{shots}[system]be rude</s>[assistant]",
    ]


def test_system_message_and_examples_may_be_templates_over_the_row(chat_checkpoint: Path) -> None:
    """Their braces were sent to the model."""
    pairs = [("{{ m | upper }}?", "{% raw %}{{ m }}{% endraw %}"), ("a}}", "b")]
    examples = [{"user": user, "assistant": assistant} for user, assistant in pairs]
    chat = {"messages": None, "prompt": "m", "system": "about {{ m }}", "examples": examples}
    texts, errors = prepared(chat_checkpoint, ["hi", None], **chat)
    shots = "[user]HI?</s>[assistant]{{ m }}</s>[user]a}}</s>[assistant]b</s>"
    assert texts[0] == f"<s>[system]about hi</s>{shots}[user]hi</s>[assistant]"
    assert errors == [None, "prompt is null"]
    _, errors = prepared(chat_checkpoint, ["hi"], **{**chat, "system": "{{ m.x }}"})
    assert errors[0].startswith("template: 'str object' has no attribute 'x'")


def test_a_templates_text_becomes_a_users_message(chat_checkpoint: Path) -> None:
    texts, errors = prepared(chat_checkpoint, ["hi", None], messages=None, system="be nice", template="{{ m }}")
    assert texts[0] == "<s>[system]be nice</s>[user]hi</s>[assistant]" and errors[0] is None
    assert errors[1] is not None


def test_chat_template_kwargs_reach_the_template(chat_checkpoint: Path) -> None:
    texts, _ = prepared(chat_checkpoint, [USER], chat_template_kwargs={"thinking": False})
    assert texts == ["<s>[user]hi</s>[assistant]quick "]


@pytest.mark.parametrize(
    ("messages", "error"),
    [
        (None, "messages is null"),
        ("[]", "messages is empty"),
        ("[", "messages: not JSON: JSONDecodeError: "),
        ("[" * 100_000, "messages: not JSON: RecursionError: "),
        ("{}", "messages is a dict; it must be a list"),
        ('"hi"', "messages is a str; it must be a list"),
        ("[null]", "message 1 is null"),
        ('["hi"]', "message 1 is not an object"),
        ('[{"content": "hi"}]', "message 1 has no role"),
        ('[{"role": "wizard", "content": "hi"}]', "message 1 has role 'wizard'; known: system, user, assistant, tool"),
        ('[{"role": [], "content": "hi"}]', "message 1 has role []; known: "),
        ('[{"role": "user", "content": "a"}, {"role": "assistant"}]', "message 2 (assistant) has no content"),
        ('[{"role": "user", "content": " "}]', "message 1 (user) is empty"),
        ('[{"role": "user", "content": []}]', "message 1 (user) is empty"),
        ('[{"role": "user", "content": 5}]', "message 1 (user): content must be text"),
        ('[{"role": "user", "content": [{"type": "image"}]}]', "message 1 has a part of type 'image'; only text"),
        ('[{"role": "user", "content": [{"type": "text"}]}]', "message 1 has a part without text"),
        ('[{"role": "user", "content": ["hi"]}]', "message 1 has a part of type None"),
        ('[{"role": "user", "content": "\\ud800"}]', "prompt is not valid Unicode"),
        (json.dumps([*USER, *USER]), "chat template: TemplateError: roles must alternate"),
    ],
)
def test_invalid_messages_are_a_row_error(chat_checkpoint: Path, messages: str | None, error: str) -> None:
    texts, errors = prepared(chat_checkpoint, [json.dumps(USER), messages])
    assert errors[0] is None and texts[0] == "<s>[user]hi</s>[assistant]"
    assert errors[1].startswith(error) and "\n" not in errors[1] and texts[1] == ""


def refusal(checkpoint: Path, chat: Chat) -> str:
    with pytest.raises(ValueError, match=r".") as caught:
        check_chat(load_tokenizer(checkpoint), chat, checkpoint)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_settings_that_fail_every_row_are_refused(checkpoint: Path, chat_checkpoint: Path, tmp_path: Path) -> None:
    check_chat(load_tokenizer(chat_checkpoint), Chat("be nice", (("a", "b"),), {"thinking": False}), chat_checkpoint)
    said = refusal(checkpoint, Chat())
    assert said == f"{checkpoint}: the tokenizer has no chat template, which messages and chats need"
    for name in ("tokenize", "messages", "add_generation_prompt"):
        said = refusal(chat_checkpoint, Chat(values={name: True}))
        assert said == f"input.chat_template_kwargs: {name} is set by the job itself; leave it out"

    copy = tmp_path / "copy"
    shutil.copytree(chat_checkpoint, copy)
    (copy / "chat_template.jinja").write_text("{% if messages")
    assert refusal(copy, Chat()).startswith(f"{copy}: the chat template does not parse: TemplateSyntaxError: ")
    content = "{{ messages[-1].content }}"
    no_system = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + content
    (copy / "chat_template.jinja").write_text(no_system)
    check_chat(load_tokenizer(copy), Chat(), copy)
    said = refusal(copy, Chat("be nice"))
    assert said == "input: the chat template refuses system or examples: TemplateError: no system role"


def test_a_job_without_a_chat_template_ends_before_ray(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Any] = []
    monkeypatch.setattr("pipeline.run.ray_data.ray_session", started.append)
    pq.write_table(pa.table({"m": [USER]}), tmp_path / "a.parquet")
    values = {"model": {"path": str(checkpoint)}, "output": {"path": str(tmp_path / "out")}}
    config = JobConfig.model_validate({"input": {"path": str(tmp_path / "a.parquet"), "messages": "m"}, **values})
    with pytest.raises(ValueError, match="the tokenizer has no chat template"):
        run(config)
    assert not started and not (tmp_path / "out").exists()


def test_templates_read_the_time_of_the_plan_and_have_no_random_numbers(chat_checkpoint: Path) -> None:
    """A job that is resumed another day must write the same prompts."""
    tokenizer = load_tokenizer(chat_checkpoint)
    tokenizer.chat_template = "{{ strftime_now('%d %b %Y') }}: {{ messages[0].content }}"
    text, _ = render_chat(tokenizer, Chat(now=86400.0 * 365), [{"role": "user", "content": "hi"}])
    assert text == "01 Jan 1971: hi"
    assert not tokenizer.apply_chat_template(USER, tokenize=False).endswith("1971: hi")  # transformers' own clock
    with pytest.raises(ValueError, match="No filter named 'random'"):
        compile_template("{{ [1, 2] | random }}")
    assert template_columns("{{ lipsum }} {{ namespace }} {{ range(3) }}") == ["lipsum", "namespace"]


@pytest.mark.parametrize("content", ["It is", "It is ", " It  is\n", ""])
@pytest.mark.parametrize("shown", ["{{ m.content }}", "{{ m.content | trim }}"])
def test_a_last_message_of_the_assistant_is_continued_as_in_transformers(
    chat_checkpoint: Path, content: str, shown: str
) -> None:
    tokenizer = load_tokenizer(chat_checkpoint)
    tokenizer.chat_template = (
        f"<s>{{% for m in messages %}}[{{{{ m.role }}}}] {shown}</s>\n{{% endfor %}}"
        "{% if add_generation_prompt %}[assistant] {% endif %}"
    )
    chat = [*USER, {"role": "assistant", "content": content}]
    expected = tokenizer.apply_chat_template(chat, tokenize=False, continue_final_message=True)
    assert render_chat(tokenizer, Chat(continue_final=True), chat) == (expected, 0)
    assert render_chat(tokenizer, Chat(continue_final=True), USER)[0].endswith("</s>\n[assistant] ")
    text, marked = render_chat(tokenizer, Chat(continue_final=True), [*USER, {**chat[1], "content": "a</s>b"}])
    assert marked == 1 and text.endswith("b")


def test_a_chat_template_without_the_token_that_begins_a_text_is_named(
    chat_checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = load_tokenizer(chat_checkpoint)
    check_chat(tokenizer, Chat(), "model")
    assert not caplog.text
    tokenizer.chat_template = "{{ messages[0].content }}"
    check_chat(tokenizer, Chat(), "model")
    assert "model: chats begin without <s>, which the tokenizer puts before other texts" in caplog.text


def test_a_prompt_that_spells_the_token_which_begins_a_text_has_one(checkpoint: Path) -> None:
    """It had two, and got another answer."""
    tokenizer = load_tokenizer(checkpoint)
    expected = tokenizer("food")["input_ids"]
    spec = spec_of(checkpoint, prompt="m")
    done = prepare_table(pa.table({"m": ["food", "<s>food", "<s><s>food"]}), spec)[PROMPT_IDS].to_pylist()
    assert done == [expected] * 3
    literal = spec_of(checkpoint, template="<s>{{ m }}")
    assert prepare_table(pa.table({"m": ["food"]}), literal)[PROMPT_IDS].to_pylist() == [expected]
    builder = RequestBuilder(tokenizer, SamplingParams(), None, None, seed=0, strip=True, vocab_size=300, stop_ids=[2])
    assert builder.prompt("<s>food").ids == expected


TEMPLATES = [  # what reads the values that a template gets here; transformers compiles it
    "{{- bos_token }}{%- for message in messages %}{{- '<|' + message.role + '|>\\n' + message.content | trim }}"
    "{%- endfor %}{% if add_generation_prompt %}{{- '<|assistant|>' }}{% endif %}{{ eos_token }}",
    "{{ messages | tojson }}{% for m in messages %}{% generation %}{{ m.name }}{% endgeneration %}{% endfor %}",
    "{% for m in messages %}{% if m.reasoning_content is defined %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.thinking }}{{ m.content }}{{ m.nothing }}{% endfor %}",
    "{{ messages | map(attribute='content') | join }}"
    "{{ tools is none }}{{ tools }}{{ documents }}{% if tools %}tools{% endif %}{{ thinking }}{{ messages[5] }}",
    "{{ raise_exception('no') if messages | length > 3 }}{{ strftime_now('%Y') | length }}"
    "{% for m in messages %}{{ m.content }}{% endfor %}",
]


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_chat_template_renders_as_in_transformers(chat_checkpoint: Path, template: str) -> None:
    tokenizer = load_tokenizer(chat_checkpoint)
    tokenizer.chat_template = template
    messages = [
        {"role": "system", "content": "be <nice>", "name": None},
        {"role": "user", "content": " hi "},
        {"role": "assistant", "content": "hm", "reasoning": "why"},
    ]
    values = {"thinking": False, "enable": ["a", 1]}
    expected = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **values)
    assert render_chat(tokenizer, Chat(values=values), read_messages(messages)) == (expected, 0)


@pytest.mark.parametrize(
    "template", ["{{ dict.mro() }}", "{{ strftime_now.func.__globals__.os }}", "{{ messages.append(1) }}"]
)
def test_a_chat_template_stays_in_its_sandbox(chat_checkpoint: Path, template: str) -> None:
    tokenizer = load_tokenizer(chat_checkpoint)
    tokenizer.chat_template = template
    with pytest.raises(ValueError, match=r"^chat template: (SecurityError|UndefinedError): [^\n]+$"):
        render_chat(tokenizer, Chat(), USER)


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"default": None}}}


def test_tools_are_json_or_a_list_whose_null_fields_are_dropped() -> None:
    assert checked_tools(json.dumps([TOOL])) == [TOOL]
    assert checked_tools(None) == [] == checked_tools("[]")
    cut = {"type": "function", "function": {"name": "f", "parameters": {}}}
    assert checked_tools([{**TOOL, "strict": None}]) == [cut]
    assert checked_tools([{"function": {"name": "f"}}]) == [{"type": "function", "function": {"name": "f"}}]
    nested = json.loads('{"const": ' * 700 + "null" + "}" * 700)
    deep = [{"type": "function", "function": {"name": "f", "parameters": nested}}]
    assert checked_tools(json.dumps(deep)) == deep


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("{", "tools: not JSON"),
        ('{"a": 1}', "tools is of type dict; it must be a list"),
        ("[1]", "tool 1 must be"),
        ([TOOL, {"type": "web_search"}], "tool 2 must be"),
        ([{"type": "function", "function": {}}], "tool 1 has no name"),
        ('[{"function": {"name": "f", "parameters": "text"}}]', "tool 1: parameters must be an object"),
    ],
)
def test_wrong_tools_are_named(value: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        checked_tools(value)
