"""Random little models of transformers, whose config.json and tensors are changed as tools of the field change them."""

import json
import pathlib
from typing import Any

from hypothesis import strategies as st

WORDS = 64  # of the tokenizer; models have as many rows or more
FAMILIES = ("gpt2", "llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe", "olmoe")
# What megajax's blocks do not compute: only models with one of these may be refused.
DYNAMIC = ("dynamic", "longrope")


@st.composite
def models(draw) -> dict[str, Any]:
    """The keys of a configuration ("keys"), its family, and changes of the saved directory ("changes")."""
    family = draw(st.sampled_from(FAMILIES))
    pick = lambda *values: draw(st.sampled_from(values))  # noqa: E731
    if family == "gpt2":
        keys = {
            "n_layer": pick(1, 2),
            "n_embd": 16,
            "n_head": pick(1, 2, 4),
            "n_inner": pick(None, 24),
            "n_positions": 64,
        }
        keys |= {
            "activation_function": pick("gelu_new", "gelu", "relu"),
            "scale_attn_by_inverse_layer_idx": pick(False, False, True),
        }
        keys |= {"layer_norm_epsilon": pick(1e-5, 1e-3), "tie_word_embeddings": pick(True, True, False)}
    else:
        heads = pick(2, 4)
        keys = {"num_hidden_layers": pick(1, 2, 3), "hidden_size": 16, "num_attention_heads": heads}
        keys |= {
            "num_key_value_heads": pick(1, 2, heads),
            "intermediate_size": pick(16, 24),
            "max_position_embeddings": 64,
        }
        keys |= {
            "rms_norm_eps": pick(1e-6, 1e-3),
            "hidden_act": pick("silu", "silu", "gelu_pytorch_tanh", "gelu", "relu"),
        }
        keys |= {"tie_word_embeddings": pick(True, False), "rope_parameters": draw(ropes())}
        if family not in ("olmoe", "qwen2"):
            keys |= {"head_dim": pick(4, 8)}
        if family == "llama":
            keys |= {"attention_bias": pick(False, False, True), "mlp_bias": pick(False, False, True)}
        if family in ("qwen3", "qwen3_moe", "olmoe"):
            keys |= {"attention_bias": pick(False, False, True)}
        if family in ("mistral", "mixtral"):
            keys |= {"sliding_window": pick(None, 5)}
        if family in ("qwen2", "qwen3"):
            keys |= {"use_sliding_window": pick(False, True), "sliding_window": 5, "max_window_layers": pick(0, 1, 28)}
        if family == "mixtral":
            keys |= {"num_local_experts": pick(2, 3), "num_experts_per_tok": pick(1, 2)}
        if family in ("qwen3_moe", "olmoe"):
            keys |= {"num_experts": pick(2, 4), "num_experts_per_tok": pick(1, 2), "norm_topk_prob": pick(True, False)}
        if family == "qwen3_moe":
            keys |= {
                "moe_intermediate_size": 8,
                "decoder_sparse_step": pick(1, 1, 2),
                "mlp_only_layers": pick([], [], [0]),
            }
        if family == "olmoe":
            keys |= {"clip_qkv": pick(None, None, 0.5)}
    keys |= {
        "vocab_size": pick(WORDS, WORDS + 8),
        "bos_token_id": 0,
        "eos_token_id": pick(1, [1, 7]),
        "pad_token_id": 2,
    }
    keys |= {"attention_dropout" if family != "gpt2" else "attn_pdrop": 0.0}
    changes = {
        "dtype": pick("float32", "float32", "bfloat16", "float16"),
        "shard": pick(None, None, "8KB"),
        "legacy_rope": pick(False, False, True, "type"),
        "scaling_beside": pick(False, False, False, True),
        "own_head": pick(False, False, True),
        "no_head": pick(False, False, False, True),
        "prefix": pick(True, True, True, False),
        "extra": pick(
            {}, {"use_cache": False}, {"torch_dtype": "bfloat16"}, {"unknown_key": 1, "_attn_implementation": "eager"}
        ),
        "drop": draw(
            st.sets(
                st.sampled_from(["rms_norm_eps", "head_dim", "hidden_act", "tie_word_embeddings", "dtype"]), max_size=2
            )
        ),
        "generation": draw(generations()),
    }
    return {"family": family, "keys": keys, "changes": changes, "seed": draw(st.integers(0, 9))}


@st.composite
def ropes(draw) -> dict[str, Any]:
    """rope_parameters."""
    pick = lambda *values: draw(st.sampled_from(values))  # noqa: E731
    kind = pick("default", "default", "linear", "llama3", "yarn", "yarn", "dynamic", "longrope")
    found: dict[str, Any] = {"rope_type": kind, "rope_theta": pick(10000.0, 500.0)}
    if kind != "default":
        found["factor"] = pick(2.0, 4.0)
    if kind == "llama3":
        found |= {"low_freq_factor": 1.0, "high_freq_factor": pick(2.0, 4.0), "original_max_position_embeddings": 16}
    if kind == "yarn":
        found |= {"original_max_position_embeddings": pick(16, 32)}
        options = {"attention_factor": 1.25, "beta_fast": 16.0, "beta_slow": 2.0, "mscale": 0.7, "mscale_all_dim": 0.5}
        options |= {"truncate": False, "attn_factor": 3.0, "finetuned": True}
        found |= {name: options[name] for name in draw(st.sets(st.sampled_from(sorted(options)), max_size=3))}
    if kind == "longrope":
        found |= {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "original_max_position_embeddings": 32}
    return found


@st.composite
def generations(draw) -> dict[str, Any] | None:
    """generation_config.json, whose texts are greedy; None: there is none."""
    if draw(st.integers(0, 3)) == 0:
        return None
    options = {
        "eos_token_id": st.sampled_from([1, [1, 5], [1, 5, 9, 11]]),
        "repetition_penalty": st.sampled_from([1.0, 1.3, 0.8]),
        "no_repeat_ngram_size": st.sampled_from([0, 2, 3]),
        "suppress_tokens": st.sampled_from([[], [3, 4, 20]]),
        "begin_suppress_tokens": st.sampled_from([[1], [6, 7]]),
        "min_new_tokens": st.sampled_from([0, 4]),
        "bad_words_ids": st.sampled_from([[[10]], [[12], [13]]]),
        "forced_eos_token_id": st.just(1),
        "exponential_decay_length_penalty": st.just([2, 1.1]),
        "sequence_bias": st.just([[[21], 1.5]]),
        "temperature": st.just(0.6),
        "top_k": st.just(50),
        "max_length": st.sampled_from([20, 512]),
        "num_beams": st.sampled_from([1, 1, 1, 2]),
        "bos_token_id": st.just(0),
        "pad_token_id": st.just(2),
    }
    names = draw(st.sets(st.sampled_from(sorted(options)), max_size=5))
    return {"do_sample": False} | {name: draw(options[name]) for name in names}


def may_be_refused(model: dict[str, Any]) -> bool:
    """Whether it has something that megajax refuses by name."""
    keys, changes, family = model["keys"], model["changes"], model["family"]
    rope = keys.get("rope_parameters", {})
    activation = keys.get("hidden_act", keys.get("activation_function"))
    return bool(
        rope.get("rope_type") in DYNAMIC
        or activation == "relu"
        or (activation == "gelu" and family != "gpt2")
        or keys.get("scale_attn_by_inverse_layer_idx")
        or keys.get("attention_bias", False) != (keys.get("mlp_bias", False) if family == "llama" else False)
        or keys.get("clip_qkv")
        or changes["no_head"]
        or changes["scaling_beside"]
        or (
            family == "qwen3_moe"
            and keys["num_hidden_layers"] == 1
            and (keys["mlp_only_layers"] or keys["decoder_sparse_step"] > 1)
        )
    )


def write_model(folder: pathlib.Path, model: dict[str, Any]) -> None:
    """Saves the model by transformers, and makes the changes. Needs torch."""
    import torch
    import transformers
    from safetensors.torch import load_file, save_file

    torch.manual_seed(model["seed"])
    changes = model["changes"]
    config = transformers.AutoConfig.for_model(model["family"], **model["keys"], initializer_range=0.4)
    network = transformers.AutoModelForCausalLM.from_config(config).to(getattr(torch, changes["dtype"]))
    network.save_pretrained(folder, **({"max_shard_size": changes["shard"]} if changes["shard"] else {}))
    path = folder / "config.json"
    keys = json.loads(path.read_text()) | changes["extra"]
    rope = keys.get("rope_parameters")
    if rope and changes["legacy_rope"]:
        del keys["rope_parameters"]
        keys["rope_theta"] = rope.pop("rope_theta")
        kind = rope.pop("rope_type")
        keys["rope_scaling"] = (
            None if kind == "default" else rope | {"type" if changes["legacy_rope"] == "type" else "rope_type": kind}
        )
    elif rope and changes["scaling_beside"]:
        keys["rope_scaling"] = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    for name in changes["drop"]:
        keys.pop(name, None)
    path.write_text(json.dumps(keys))
    (folder / "generation_config.json").unlink(missing_ok=True)
    if changes["generation"] is not None:
        (folder / "generation_config.json").write_text(json.dumps(changes["generation"]))
    file = folder / "model.safetensors"
    if file.is_file():
        tensors = load_file(file)
        embedding = next(
            value for name, value in tensors.items() if name.endswith(("embed_tokens.weight", "wte.weight"))
        )
        if changes["own_head"]:
            tensors["lm_head.weight"] = torch.randn_like(embedding.float()).to(embedding.dtype)
        if changes["no_head"]:
            tensors.pop("lm_head.weight", None)
        if not changes["prefix"]:
            tensors = {name.removeprefix("transformer."): value for name, value in tensors.items()}
        save_file(tensors, file, {"format": "pt"})


def write_tokenizer(folder: pathlib.Path) -> None:
    """A tokenizer of Metaspace's kind, which puts <s> in front of texts: token 20 is the word w20."""
    from tokenizers import Tokenizer, decoders, pre_tokenizers, processors
    from tokenizers import models as kinds

    names = ["<s>", "</s>", "<unk>", *(f"\u2581w{token}" for token in range(3, WORDS))]
    inner = Tokenizer(kinds.WordLevel({name: token for token, name in enumerate(names)}, unk_token="<unk>"))
    inner.add_special_tokens(["<s>", "</s>", "<unk>"])
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    inner.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"clean_up_tokenization_spaces": False}))
