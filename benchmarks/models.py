"""Models of a given size for the benchmarks: Qwen3 with random weights, made on the spot.

A size is a number of parameters (`20M`, `1.5B`), or the name of a published Qwen3 whose real shapes
    are meant.
"""

import re
from pathlib import Path

SMALLEST = 500_000  # parameters: below, whole layers do not come close enough to what was asked for
LAYERS = 16  # about, so that sizes differ in the size of their tensors rather than in their number
PRESETS = {
    "0.44B": {  # the layers of 0.6B over bytes
        "vocab_size": 258,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "tie_word_embeddings": True,
    },
    "0.6B": {
        "vocab_size": 151936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "tie_word_embeddings": True,
    },
    "1.7B": {
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "tie_word_embeddings": True,
    },
    "4B": {
        "vocab_size": 151936,
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "tie_word_embeddings": True,
    },
    "8B": {
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "tie_word_embeddings": False,
    },
}
TINY = {  # so small that a server's time is Python's
    "vocab_size": 258,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "tie_word_embeddings": True,
}
VOCABULARY = 258  # tokens: the bytes, and the two special ones
SPECIAL_TOKENS = ["<|pad|>", "<|end|>"]
ZIPF = 1.5  # exponent of the frequencies of tokens
UNSAID = -20.0  # logit of tokens that no text has, about


def config_fields(size: str) -> dict:
    """
    Fields of the `Qwen3Config` of about `size` parameters.

    Raises:
        ValueError: `size` is no size, or too small a one.
    """
    if size == "tiny":
        return TINY
    if size.upper() in PRESETS:
        return PRESETS[size.upper()]
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMB])", size.upper())
    if match is None:
        raise ValueError(
            f"{size!r} is no model size: write it like 20M or 1.5B, or name one of "
            f"{', '.join(PRESETS)}"
        )
    count = float(match[1]) * {"K": 1e3, "M": 1e6, "B": 1e9}[match[2]]
    if count < SMALLEST:
        raise ValueError(f"{size!r} is too small: ask for {SMALLEST / 1e6:g}M parameters or more")
    # A layer has 12 hidden^2 parameters: 3 in the attention (half as many key-value heads as
    # heads), 9 in the MLP.
    unit = 64 if count < 1e8 else 128
    hidden = unit * max(1, round((count / (12 * LAYERS)) ** 0.5 / unit))
    head = unit // 2
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "num_hidden_layers": round((count - VOCABULARY * hidden) / (12 * hidden**2)),
        "num_attention_heads": hidden // head,
        "num_key_value_heads": hidden // head // 2,
        "head_dim": head,
        "tie_word_embeddings": True,
    }


def dtype() -> str:
    """That of a benchmark's model on this machine."""
    import torch

    return "bfloat16" if torch.cuda.is_available() else "float32"


def make_model(
    folder: Path, size: str, dtype: str, words: bool = False, positions: int = 4096
) -> int:
    """
    Saves a model of `size` for `positions` tokens, and a byte-level tokenizer, in `folder`. Returns
    its number of parameters.

    With `words`, each token above the bytes is a word, and the model samples as a language has them
    (`speak`). Without them, these tokens have no text, and all tokens are about as frequent.
    """
    import torch  # here, so that a wrong size is refused at once
    from transformers import Qwen3Config, Qwen3ForCausalLM, set_seed

    set_seed(0)
    fields = config_fields(size)
    tokenizer = byte_tokenizer(fields["vocab_size"] - VOCABULARY if words else 0)
    config = Qwen3Config(
        **fields,
        max_position_embeddings=positions,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype=getattr(torch, dtype),
    )
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = Qwen3ForCausalLM._from_config(config, dtype=getattr(torch, dtype))
    if words:
        speak(model, tokenizer)
    model.save_pretrained(folder)
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    tokenizer.save_pretrained(folder)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    del model
    torch.cuda.empty_cache()  # this process keeps nothing of what the trainer and servers need
    return parameters


def speak(model, tokenizer) -> None:
    """
    Makes a model with random weights sample valid text, in which few tokens are frequent.

    Text costs a server time, and how much depends on the tokens: the first of a kind has to be
    decoded, and so has each part of a character, in its context. Random weights sample far more of
    both than a trained model does. Here, words and then the characters of ASCII are as frequent as
    the words of a language (Zipf's law): the tenth one comes about 10^-1.5 times as often as the
    first. Other tokens hardly come.

    All embeddings have about 1 in their first place, and so have the model's last states, because
    its layers add little. So what an output embedding has there adds to the logits of its token.
    """
    import torch

    outputs = model.get_output_embeddings().weight  # (vocabulary, hidden), mostly the inputs', too
    vocabulary, hidden = outputs.shape
    special = set(tokenizer.all_special_ids)
    by_rank = []
    for token in reversed(range(vocabulary)):  # words stand behind the characters
        text = tokenizer.decode([token])
        if token not in special and text.isascii() and text.isprintable():
            by_rank.append(token)
    ranks = torch.arange(1.0, len(by_rank) + 1)
    logits = torch.full((vocabulary,), UNSAID)
    logits[by_rank] = -ZIPF * ranks.log()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weight *= 0.01
        model.get_input_embeddings().weight[:, 0] = 1.0
        outputs[:, 0] = 1 + logits.to(outputs) / hidden**0.5


def byte_tokenizer(words: int):
    """Returns a tokenizer of bytes, of so many words, and of two special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = alphabet + [f"\u0120w{number:x}" for number in range(words)]  # " w1f", for instance
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    pad, end = SPECIAL_TOKENS
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=pad, eos_token=end)
