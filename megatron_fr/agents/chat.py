"""Token-level chat: sampled turns are never rendered or tokenised again.

Only the text between two of them is: it is cut out of a dummy conversation rendered by the template.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_fr.errors import ModelError

# Words that no template treats specially; they mark places in the rendered dummy conversation.
_USER, _ASSISTANT, _TOOL = "userplaceholder", "assistantplaceholder", "toolplaceholder"


class Chat:
    """Renders prompts and observations for one tokenizer and one set of tools.

    ``stop_token_ids`` end a turn: the end tokens of the tokenizer and of its generation configuration, and the token
    with which the template closes an assistant turn. ``xml_calls`` says in which form the template asks for tool calls,
    ``thinking`` whether the prompt opens a thought.

    Raises:
        ModelError: the tokenizer has no chat template, or one that shows no tools or no tool responses, asks for calls
            in an unknown form, or has no end of turn.
    """

    def __init__(
        self, tokenizer: Any, tools: Sequence[Mapping[str, Any]] = (), template_kwargs: Mapping[str, Any] | None = None
    ) -> None:
        self._tokenizer = tokenizer
        self._tools = [dict(tool) for tool in tools] or None
        self._template_kwargs = dict(template_kwargs or {})
        if not getattr(tokenizer, "chat_template", None):
            raise self._refusal("its tokenizer has no chat template; add chat_template.jinja to the folder")
        self._special = sorted(tokenizer.get_added_vocab(), key=len, reverse=True)
        stops = _end_tokens(tokenizer)
        end_ids = self._encode(self._after_assistant([], generation_prompt=False))
        if end_ids and end_ids[0] in tokenizer.added_tokens_decoder:
            stops.append(end_ids[0])
        if not stops:
            raise self._refusal(
                "neither tokenizer nor generation_config.json names an end token (eos_token_id); add one"
            )
        self.stop_token_ids = tuple(dict.fromkeys(stops))
        prompt = self._render([{"role": "user", "content": _USER}], generation_prompt=True)
        self.thinking = "<think>" in prompt and prompt.rfind("<think>") > prompt.rfind("</think>")
        self.xml_calls = self._tools is not None and "<function=" in prompt
        if self._tools:
            self._check_tools(prompt)

    def prompt(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """The tokens before the first assistant turn, tools and generation prompt included."""
        return self._encode(self._render(messages, generation_prompt=True))

    def observation(self, responses: Sequence[str]) -> list[int]:
        """The tokens between an assistant turn that a stop token ended and the next turn.

        Special tokens that a response spells out are broken up, so that tool output cannot forge a turn.
        """
        ids = self._encode(self._after_assistant([self._defuse(r) for r in responses], generation_prompt=True))
        return ids[1:] if ids and ids[0] in self.stop_token_ids else ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of a sampled turn, without the stop token that ended it."""
        kept = token_ids[:-1] if token_ids and token_ids[-1] in self.stop_token_ids else token_ids
        return str(self._tokenizer.decode(list(kept), skip_special_tokens=False))

    def _check_tools(self, prompt: str) -> None:
        remedy = "use a template that does, or an agent without tools"
        if not all(str(tool["function"]["name"]) in prompt for tool in self._tools or ()):
            raise self._refusal(f"its chat template does not show the tools to the model; {remedy}")
        if "<arg_key>" in prompt:
            raise self._refusal(f"its chat template does not ask for tool calls in JSON or <function=NAME>; {remedy}")
        if _TOOL not in self._after_assistant([_TOOL], generation_prompt=True):
            raise self._refusal(f"its chat template does not show messages of role 'tool'; {remedy}")

    def _defuse(self, text: str) -> str:
        for token in self._special:
            if len(token) > 1 and token in text:
                text = text.replace(token, f"{token[0]} {token[1:]}")
        return text

    def _after_assistant(self, responses: Sequence[str], *, generation_prompt: bool) -> str:
        """What a rendered conversation holds after an assistant's text."""
        messages = [
            {"role": "user", "content": _USER},
            {"role": "assistant", "content": _ASSISTANT},
            *({"role": "tool", "content": response} for response in responses),
        ]
        _, found, after = self._render(messages, generation_prompt=generation_prompt).partition(_ASSISTANT)
        if not found:
            raise self._refusal("its chat template does not show an assistant's text")
        return after

    def _render(self, messages: Sequence[Mapping[str, Any]], *, generation_prompt: bool) -> str:
        import jinja2

        try:
            text = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tools=self._tools,
                add_generation_prompt=generation_prompt,
                tokenize=False,
                **self._template_kwargs,
            )
        except jinja2.TemplateError as error:
            roles = ", ".join(str(message.get("role")) for message in messages)
            raise self._refusal(f"its chat template refuses a conversation of {roles}: {error}") from error
        return str(text)

    def _refusal(self, reason: str) -> ModelError:
        name = getattr(self._tokenizer, "name_or_path", "") or type(self._tokenizer).__name__
        return ModelError(f"model.path={name!r}: {reason}")

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])


def _end_tokens(tokenizer: Any) -> list[int]:
    """End tokens named beside the tokenizer by ``generation_config.json``, else by ``config.json``; and its own."""
    folder = Path(getattr(tokenizer, "name_or_path", "") or "")
    found: Any = None
    for path in (folder / "generation_config.json", folder / "config.json"):
        if found is None and path.is_file():
            try:
                found = json.loads(path.read_bytes()).get("eos_token_id")
            except (ValueError, AttributeError) as error:
                raise ModelError(f"{path} cannot be read: {error}; fetch it again") from error
    return [i for i in (*(found if isinstance(found, list) else [found]), tokenizer.eos_token_id) if i is not None]
