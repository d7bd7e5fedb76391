"""Tokenizer of the tiny models: byte-level BPE, single digits, and a chat template in Qwen3's style."""

from __future__ import annotations

import random
import re
from typing import Any

from megatron_fr.agents.arithmetic import questions
from megatron_fr.agents.tool_call import PYTHON_TOOL_SCHEMA
from tools.tiny.traces import MODES, trace

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKUP_TOKENS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")

#: Tokens of the vocabulary, special ones included. Models pad their embeddings above it.
TOKENIZER_SIZE = 506

CHAT_TEMPLATE = r"""
{%- if tools or messages[0].role == 'system' -%}
    {{- '<|im_start|>system\n' -}}
    {%- if messages[0].role == 'system' -%}{{- messages[0].content -}}{%- endif -%}
    {%- if tools -%}
        {%- if messages[0].role == 'system' -%}{{- '\n\n' -}}{%- endif -%}
        {{- 'Tools:' -}}
        {%- for tool in tools -%}{{- '\n' + (tool | tojson) -}}{%- endfor -%}
        {{- '\nTo call one:\n<tool_call>\n{"name": ..., "arguments": {...}}\n</tool_call>' -}}
    {%- endif -%}
    {{- '<|im_end|>\n' -}}
{%- endif -%}
{%- for message in messages -%}
    {%- if message.role == 'tool' -%}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' -%}{{- '<|im_start|>user' -}}{%- endif -%}
        {{- '\n<tool_response>\n' + message.content + '\n</tool_response>' -}}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' -%}{{- '<|im_end|>\n' -}}{%- endif -%}
    {%- elif message.role != 'system' -%}
        {{- '<|im_start|>' + message.role + '\n' + (message.content or '') -}}
        {%- for call in message.tool_calls or [] -%}
            {%- set function = call.function or call -%}
            {%- if message.content or not loop.first -%}{{- '\n' -}}{%- endif -%}
            {{- '<tool_call>\n{"name": "' + function.name + '", "arguments": ' -}}
            {{- (function.arguments if function.arguments is string else function.arguments | tojson) -}}
            {{- '}\n</tool_call>' -}}
        {%- endfor -%}
        {{- '<|im_end|>\n' -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}
""".strip()


def make_tokenizer(size: int = TOKENIZER_SIZE, *, seed: int = 0) -> Any:
    """Train the tokenizer on generated conversations; the same arguments give the same tokenizer.

    Digits and line ends are single tokens; everything between them may merge.

    Args:
        size: tokens of the vocabulary, at least 256 bytes plus 7 special tokens; merges fill the rest.

    Returns:
        A ``PreTrainedTokenizerFast`` with a chat template.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\d|\n"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    marks = (*SPECIAL_TOKENS, *MARKUP_TOKENS)
    trainer = trainers.BpeTrainer(
        vocab_size=size - len(marks),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        min_frequency=2,
        show_progress=False,
    )
    backend.train_from_iterator(_corpus(seed), trainer=trainer)
    backend.add_special_tokens([AddedToken(mark, special=True) for mark in SPECIAL_TOKENS])
    backend.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in MARKUP_TOKENS])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        model_max_length=4096,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


def _corpus(seed: int, conversations: int = 200) -> list[str]:
    """Rendered conversations, cut at the special tokens."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    renderer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), chat_template=CHAT_TEMPLATE)
    marks = re.compile("|".join(re.escape(mark) for mark in (*SPECIAL_TOKENS, *MARKUP_TOKENS)))
    rng = random.Random(seed)
    source = questions(seed)
    pieces: list[str] = []
    for _ in range(conversations):
        messages = trace(next(source), rng.choice(MODES), rng)
        text = str(renderer.apply_chat_template(messages, tools=[PYTHON_TOOL_SCHEMA], tokenize=False))
        pieces += [piece for piece in marks.split(text) if piece]
    return pieces
