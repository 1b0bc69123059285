"""A tokenizer folder, a model and conversations for the tests of chat data."""

import json
from pathlib import Path
from typing import Any

MARKED = """\
{{- bos_token }}
{%- if tools %}{{- '<|im_start|>system\\nTools: ' + tools | tojson + '<|im_end|>\\n' }}{% endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' %}
        {%- generation %}
        {%- if message.tool_calls %}{{- message.tool_calls | tojson }}{% endif %}
        {{- message.content + '<|im_end|>' }}
        {%- endgeneration %}
        {{- '\\n' }}
    {%- else %}
        {{- message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""
UNMARKED = MARKED.replace("{%- generation %}", "").replace("{%- endgeneration %}", "")
# As Qwen3 does: reasoning is shown in the last turn only, and is empty where there is none.
FORGETFUL = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' and loop.last %}
        {{- '<think>' + message.reasoning_content | default('') + '</think>' }}
    {%- endif %}
    {{- message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
CALL = [{"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}]
CHATS = [
    {"messages": [user("hello there"), assistant("general greeting, with a comma")]},
    {
        "messages": [
            {"role": "system", "content": "Be brief."},
            user("2+2?"),
            assistant("4"),
            user("3+3?"),
            assistant("6"),
        ]
    },
    {
        "messages": [
            user("What is 1 + 2? \N{GREEK SMALL LETTER ALPHA}\N{SNOWMAN} "),
            assistant("", tool_calls=CALL),
            {"role": "tool", "content": "3"},
            assistant("It is 3 \N{SNOWMAN}."),
        ],
        "tools": TOOLS,
    },
    {"messages": [user("spaces"), assistant("  leading and trailing  ")]},
    {"messages": [user('<b>tags</b> & "quotes"'), assistant("\N{GRINNING FACE} line\nbreak")]},
]


def tokenizer_folder(folder: Path, template: str = MARKED) -> Path:
    """A byte-level BPE with some merges and tokens for turns, saved as `transformers` reads it."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, special_tokens=["<s>", "</s>"])
    tokenizer.train_from_iterator([json.dumps(CHATS), "assistant user system leading trailing"] * 3, trainer)
    tokenizer.add_special_tokens([AddedToken("<|im_start|>"), AddedToken("<|im_end|>")])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": {"content": "<|im_end|>", "__type": "AddedToken"},
        "chat_template": template,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def write_chats(path: Path, chats: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    return path


def make_model(folder: Path, longest: int = 64) -> Path:
    """A tiny random Qwen3 MoE of `transformers` for sequences of up to `longest` tokens, and the tokenizer above."""
    import torch
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(tokenizer_folder(folder))
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        vocab_size=320,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=64,
        moe_intermediate_size=32,
        num_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=longest,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    transformers.Qwen3MoeForCausalLM(config).save_pretrained(folder)
    return folder
