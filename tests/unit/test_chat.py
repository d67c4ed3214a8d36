"""Chat templates: where they are found, what they may do, how refusals read."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from orca_dist.errors import InvalidRequest, MissingCapability, ModelError
from orca_dist.text import ChatTemplate

USER = [{"role": "user", "content": "hi <b>"}]
PLAIN = """{% for message in messages %}
    {% if message.role == 'tool' %}
        {{ raise_exception('no tools here') }}
    {% endif %}
<{{ message.role }}>{{ message.content }}{{ eos_token }}
{% endfor %}
{% if add_generation_prompt %}<assistant>{% endif %}"""


def load(folder: Path, template: Any, **config: Any) -> ChatTemplate:
    document = {"chat_template": template, "eos_token": "</s>", **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(document), encoding="utf-8")
    return ChatTemplate.load(folder, clock=lambda: datetime(2022, 7, 11))


def test_blocks_leave_no_blank_lines(tmp_path: Path) -> None:
    chat = load(tmp_path, PLAIN)
    assert chat.available
    assert chat.render(USER) == "<user>hi <b></s>\n<assistant>"
    assert chat.render(USER, add_generation_prompt=False) == "<user>hi <b></s>\n"


def test_a_file_of_its_own_comes_first(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("file {{ bos_token }}", encoding="utf-8")
    assert load(tmp_path, "config", bos_token={"content": "<s>"}).render(USER) == "file <s>"


def test_the_default_one_of_several(tmp_path: Path) -> None:
    several = [{"name": "rag", "template": "r"}, {"name": "default", "template": "d"}]
    assert load(tmp_path, several).render(USER) == "d"


@pytest.mark.parametrize("template", [None, [{"name": "rag", "template": "r"}]])
def test_none_is_a_missing_capability_only_when_used(tmp_path: Path, template: Any) -> None:
    chat = load(tmp_path, template)
    assert not chat.available
    with pytest.raises(MissingCapability, match="has no chat template"):
        chat.render(USER)


def test_no_config_file_at_all(tmp_path: Path) -> None:
    assert not ChatTemplate.load(tmp_path).available


def test_what_the_template_raises_reaches_the_caller(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="no tools here") as caught:
        load(tmp_path, PLAIN).render([{"role": "tool", "content": "x"}])
    assert caught.value.field == "chat"


GEMMA = """{{ bos_token }}{% if messages[0]['role'] == 'system' %}
{{ raise_exception('there is no system role') }}{% endif %}
{% for message in messages %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('user and assistant have to take turns') }}{% endif %}
{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}
{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}
{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"""


def test_a_template_as_gemma_has_it(tmp_path: Path) -> None:
    """The assistant is called model, and nobody is system."""
    chat = load(tmp_path, GEMMA, bos_token="<bos>")
    messages = [*USER, {"role": "assistant", "content": "yes? "}, {"role": "user", "content": "no"}]
    assert chat.render(messages) == (
        "<bos><start_of_turn>user\nhi <b><end_of_turn>\n"
        "<start_of_turn>model\nyes?<end_of_turn>\n"
        "<start_of_turn>user\nno<end_of_turn>\n<start_of_turn>model\n"
    )
    for refused, problem in (
        ([{"role": "system", "content": "be brief"}, *USER], "there is no system role"),
        ([*USER, *USER], "have to take turns"),
    ):
        with pytest.raises(InvalidRequest, match=f"the chat template refuses it: .*{problem}"):
            chat.render(refused)


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[7].content }}",
        "{{ 1 // 0 }}",
        "{{ messages[0].content + 1 }}",
        "{{ range(10**9) | list }}",
    ],
)
def test_a_template_that_fails_ends_only_its_request(tmp_path: Path, template: str) -> None:
    with pytest.raises(InvalidRequest, match="the chat template refuses it"):
        load(tmp_path, template).render(USER)


def test_a_template_can_not_change_the_callers_messages(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "hi"}]
    with pytest.raises(InvalidRequest):
        load(tmp_path, "{{ messages[0].update(content='x') }}").render(messages)
    assert messages == [{"role": "user", "content": "hi"}]


def test_invalid_jinja_is_found_at_load(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="is not valid Jinja"):
        load(tmp_path, "{% for %}")


def test_helpers_that_templates_expect(tmp_path: Path) -> None:
    template = (
        "{{ strftime_now('%d %b %Y') }}|{{ messages[0] | tojson }}|{% for m in [1, 2] %}"
        "{% generation %}{{ m }}{% endgeneration %}{% break %}{% endfor %}|{{ tools is none }}"
    )
    want = '11 Jul 2022|{"role": "user", "content": "hi <b>"}|1|True'
    assert load(tmp_path, template).render(USER) == want


@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        ([], "has no messages"),
        ([{"role": "", "content": "x"}], "message 0 has the role ''"),
        ([*USER, {"role": "robot", "content": "x"}], "message 1 has the role 'robot'"),
        ([{"role": "user", "content": [{"type": "image"}]}], "content of message 0 must be text"),
        ([{"role": "user"}], "content of message 0 must be text"),
    ],
)
def test_malformed_messages(tmp_path: Path, messages: list[Any], problem: str) -> None:
    with pytest.raises(InvalidRequest, match=problem):
        load(tmp_path, PLAIN).render(messages)
