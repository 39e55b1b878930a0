"""Makes the quickstart's model on the spot: a byte-level Qwen3 of 0.3 million parameters with
random weights.

python recipes/quickstart/make_model.py FOLDER [--seed 42] [--max_position_embeddings 1024]
"""

import argparse

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM, set_seed

SPECIAL_TOKENS = ["<|pad|>", "<|end|>"]


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, so that the environment's text and the model's tokens agree letter by
    letter."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    pad, end = SPECIAL_TOKENS
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=pad, eos_token=end)
    wrapped.chat_template = (
        "{% for message in messages %}{{ message['role'][0] }}:{{ message['content'] }}"
        "{% if message['role'] == 'assistant' %}" + end + "{% endif %}\n{% endfor %}"
        "{% if add_generation_prompt %}a:{% endif %}"
    )
    return wrapped


def make_model(folder: str, seed: int, **changes) -> None:
    """Saves the model and its tokenizer in `folder`. `changes` are other fields of the
    configuration."""
    set_seed(seed)
    tokenizer = byte_tokenizer()
    fields = {
        "vocab_size": len(tokenizer),
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    config = Qwen3Config(**(fields | changes))
    model = Qwen3ForCausalLM(config).to(torch.float32)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder")
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--max_position_embeddings", type=int, default=1024)
    options = parser.parse_args()
    make_model(
        options.folder,
        options.seed,
        max_position_embeddings=options.max_position_embeddings,
    )
    print(f"quickstart model: {options.folder}")
