#!/usr/bin/env python3
"""Writes a Hugging Face folder with made-up bf16 weights of a llama geometry, to measure with.

    scripts/make_geometry_model.py OUT [layers d_model heads kv_heads head_dim ffn vocab]

The default is the 1B geometry of `omnikv bench --geometry llama-1b` (2.1 GB). There is no
tokenizer in it: `omnikv bench -m OUT` and `omnikv logits -m OUT` run it, `run` does not.
"""
import json
import pathlib
import struct
import sys


def tensors(layers, d, heads, kv_heads, head_dim, ffn, vocab):
    yield "model.embed_tokens.weight", (vocab, d)
    for i in range(layers):
        p = f"model.layers.{i}."
        yield p + "input_layernorm.weight", (d,)
        yield p + "self_attn.q_proj.weight", (heads * head_dim, d)
        yield p + "self_attn.k_proj.weight", (kv_heads * head_dim, d)
        yield p + "self_attn.v_proj.weight", (kv_heads * head_dim, d)
        yield p + "self_attn.o_proj.weight", (d, heads * head_dim)
        yield p + "post_attention_layernorm.weight", (d,)
        yield p + "mlp.gate_proj.weight", (ffn, d)
        yield p + "mlp.up_proj.weight", (ffn, d)
        yield p + "mlp.down_proj.weight", (d, ffn)
    yield "model.norm.weight", (d,)
    yield "lm_head.weight", (vocab, d)


def main():
    out = pathlib.Path(sys.argv[1])
    sizes = [int(a) for a in sys.argv[2:]] or [16, 2048, 32, 8, 64, 8192, 32000]
    layers, d, heads, kv_heads, head_dim, ffn, vocab = sizes
    out.mkdir(parents=True, exist_ok=True)
    (out / "config.json").write_text(json.dumps({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": layers,
        "hidden_size": d, "num_attention_heads": heads, "num_key_value_heads": kv_heads,
        "head_dim": head_dim, "intermediate_size": ffn, "vocab_size": vocab, "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0, "max_position_embeddings": 131072, "hidden_act": "silu",
        "tie_word_embeddings": False, "torch_dtype": "bfloat16", "eos_token_id": 2}))
    header, end = {}, 0
    for name, shape in tensors(*sizes):
        n = 2
        for s in shape:
            n *= s
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [end, end + n]}
        end += n
    # Small values of both signs, without a period that a row's length divides.
    state, noise = 1, bytearray()
    for _ in range(1 << 20):
        state = (state * 1664525 + 1013904223) % (1 << 32)
        noise += struct.pack("<H", (state >> 31 << 15) | (0x3C00 + (state >> 8) % 0x100))
    ones = struct.pack("<H", 0x3F80)
    with open(out / "model.safetensors", "wb") as f:
        text = json.dumps(header).encode()
        f.write(struct.pack("<Q", len(text)) + text)
        for t in header.values():
            left = t["data_offsets"][1] - t["data_offsets"][0]
            if len(t["shape"]) == 1:
                f.write(ones * (left // 2))
                continue
            while left > 0:
                f.write(noise[:min(left, len(noise) - 2 * 997)])
                left -= min(left, len(noise) - 2 * 997)


if __name__ == "__main__":
    main()
