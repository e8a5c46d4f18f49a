"""Chats and chat templates for tests, and the small tokenizer of tests/data/chat.

python -m tests.data.chats      writes tests/data/chat: a byte-level BPE of 400 tokens, trained on the package's text
"""

import json
import pathlib

FOLDER = pathlib.Path(__file__).parent / "chat"
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>", "</s>", "[INST]", "[/INST]"]

CHATML = (
    "{% for message in messages %}{% if loop.first and message['role'] != 'system' %}<|im_start|>system\n"
    "You are helpful.<|im_end|>\n{% endif %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + "
    "'<|im_end|>' + '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
GENERATION = (
    "{{ bos_token }}\n{%- for message in messages %}\n    {%- if message.role == 'assistant' %}\n"
    "        {{- '<|im_start|>assistant\n' }}{% generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}"
    "{{ '\n' }}\n    {%- else %}\n        {{- '<|im_start|>' ~ message.role ~ '\n' ~ message.content | trim }}"
    "{{- '<|im_end|>\n' }}\n    {%- endif %}\n{%- endfor %}\n"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
INST = (  # without a prompt of a generation, like Llama 2's and Mistral's; a system message joins the first question
    "{{ bos_token }}{% if messages[0].role == 'system' %}{% set system = messages[0].content + '\n\n' %}"
    "{% set messages = messages[1:] %}{% else %}{% set system = '' %}{% endif %}{% for message in messages %}"
    "{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if message.role == 'user' %}[INST] {{ (system if loop.first else '') + message.content }} [/INST]"
    "{% else %} {{ message.content | trim }}{{ eos_token }}{% endif %}{% endfor %}"
)
THOUGHTS = (  # removes the thoughts of turns that others follow, like Qwen3's
    "{% for message in messages %}{% set text = message.content %}{% if message.role == 'assistant' and not loop.last %}"
    "{% set text = text.split('</think>')[-1] %}{% endif %}<|im_start|>{{ message.role }}\n{{ text }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEMPLATES = {"chatml": CHATML, "generation": GENERATION, "inst": INST, "thoughts": THOUGHTS}

CHATS = {
    "one turn": ["user", "What is 12 + 30?", "assistant", "42"],
    "system": ["system", "Answer in verse.", "user", "Who are you?", "assistant", "A king, of infinite space."],
    "turns": [
        "user",
        "Hello",
        "assistant",
        "Good morrow!\n",
        "user",
        "And?",
        "assistant",
        "  Farewell, caf\u00e9 \U0001f600",
    ],
    "spaces": ["user", " a ", "assistant", " b  \n\n c ", "user", "\n", "assistant", "d"],
    "special tokens": ["user", "say <|im_end|>", "assistant", "<|im_end|> said"],
    "thoughts": [
        "user",
        "2 * 3?",
        "assistant",
        "<think>six</think>6",
        "user",
        "+ 1?",
        "assistant",
        "<think>7</think>7",
    ],
}


def messages(chat: str) -> list[dict[str, str]]:
    """A chat in transformers' form."""
    words = CHATS[chat]
    return [{"role": role, "content": content} for role, content in zip(words[::2], words[1::2], strict=True)]


def write_tokenizer() -> None:
    """tokenizer.json and tokenizer_config.json."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    from megajax.data.text import load_documents

    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.post_processor = processors.ByteLevel(trim_offsets=True)  # as most have it: offsets without spaces
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    inner.train_from_iterator([load_documents()[0][:100_000]], trainer)
    inner.save(str(FOLDER / "tokenizer.json"), pretty=False)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    settings["chat_template"] = CHATML
    (FOLDER / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def main() -> None:
    """Writes all files."""
    FOLDER.mkdir(exist_ok=True)
    write_tokenizer()
    for name, template in TEMPLATES.items():
        (FOLDER / f"{name}.jinja").write_text(template)


if __name__ == "__main__":
    main()
