"""New causal language models by their sizes, in two architectures of transformers."""

import math
from typing import Any

from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig


def new_model(arch: str, layers: int, width: int, heads: int, context: int, tokenizer: Any) -> Any:
    """A GPT-2 or Llama-style model with fresh weights, tied embeddings and no dropout.

    Args:
        arch: "gpt2" or "llama".
        layers, width, heads, context: sizes; `width` is the hidden size.
        tokenizer: gives the vocabulary.
    """
    end = tokenizer.eos_token_id
    config: dict[str, Any] = {"vocab_size": len(tokenizer), "bos_token_id": end, "eos_token_id": end}
    # The usual 0.02 was meant for GPT-2's width of 768; in much smaller models plain SGD hardly moves with it.
    config["initializer_range"] = 0.02 * math.sqrt(768 / width)
    if arch == "gpt2":
        config |= {"n_layer": layers, "n_embd": width, "n_head": heads, "n_positions": context}
        config |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        model = AutoModelForCausalLM.from_config(GPT2Config(**config))
    else:
        config |= {"num_hidden_layers": layers, "hidden_size": width, "intermediate_size": 4 * width}
        config |= {"num_attention_heads": heads, "max_position_embeddings": context}
        model = AutoModelForCausalLM.from_config(LlamaConfig(**config, tie_word_embeddings=True))
    model.loss_type = "ForCausalLM"  # transformers finds it out by itself, but says that it had to
    return model
