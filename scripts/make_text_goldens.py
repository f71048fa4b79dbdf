#!/usr/bin/env python3
"""Greedy answers of the shipped model, as transformers gives them from the same weights.

    make_text_goldens.py MODEL.gguf TOKENIZER_DIR OUT.json

A test-time tool: it needs torch and transformers 5. The weights are the GGUF's own, dequantised to
float32; TOKENIZER_DIR is a Hugging Face folder of the same model, of which only the tokenizer and
its chat template are used. OUT.json holds, for 20 retrieval prompts of about 100 to 8,000 tokens:

    kind, prompt      what is asked, and the prompt's token ids
    generated         greedy token ids, up to 48, the end-of-sequence id included
    margins           by how much each one's logit beats the next best
    text, expected    what that says, and what it should say

A prompt on which the model nearly hesitates (a margin below 0.25) is drawn again, since there a
test would compare rounding errors; a wrong answer given firmly is kept.
"""

import argparse
import json
import os
import random
import struct
import time
import uuid
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch
import transformers
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

MAX_NEW = 48
MIN_MARGIN = 0.25
MAX_DRAWS = 8

# --- GGUF ----------------------------------------------------------------------------------------


class Gguf:
    """Metadata and tensors of a GGUF version 3 file with f32 and Q8_0 tensors."""

    SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q",
               12: "d"}
    STRING, ARRAY, F32, Q8_0 = 8, 9, 0, 8

    def __init__(self, path):
        self.data, self.at = path.read_bytes(), 0
        assert self.data[:4] == b"GGUF", f"{path} is not a GGUF file"
        self.at = 4
        assert self.take("I") == 3, f"{path}: only GGUF version 3 is read here"
        n_tensors, n_keys = self.take("Q"), self.take("Q")
        self.keys = {}
        for _ in range(n_keys):
            name = self.string()
            self.keys[name] = self.value(self.take("I"))
        entries = {}
        for _ in range(n_tensors):
            name = self.string()
            shape = [self.take("Q") for _ in range(self.take("I"))]  # fastest dimension first
            entries[name] = (shape[::-1], self.take("I"), self.take("Q"))
        alignment = self.keys.get("general.alignment", 32)
        start = -(-self.at // alignment) * alignment
        self.tensors = {name: self.floats(shape, kind, start + offset)
                        for name, (shape, kind, offset) in entries.items()}

    def take(self, kind):
        (value,) = struct.unpack_from("<" + kind, self.data, self.at)
        self.at += struct.calcsize("<" + kind)
        return value

    def string(self):
        n = self.take("Q")
        self.at += n
        return self.data[self.at - n:self.at].decode()

    def value(self, kind):
        if kind == self.STRING:
            return self.string()
        if kind == self.ARRAY:
            kind, n = self.take("I"), self.take("Q")
            return [self.value(kind) for _ in range(n)]
        return self.take(self.SCALARS[kind])

    def floats(self, shape, kind, offset):
        n = int(np.prod(shape))
        if kind == self.F32:
            return np.frombuffer(self.data, "<f4", n, offset).reshape(shape)
        assert kind == self.Q8_0, f"tensor type {kind} is not read here"
        block = np.dtype([("scale", "<f2"), ("q", "i1", 32)])
        blocks = np.frombuffer(self.data, block, n // 32, offset)
        return (blocks["scale"].astype(np.float32)[:, None] * blocks["q"]).reshape(shape)


def halves_from_pairs(weight, heads):
    """llama.cpp stores the rows of q and k so that rotated dimensions are neighbours; transformers
    has the first of all pairs, then the second of all pairs."""
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(
        rows, columns)


LAYER_NAMES = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def load_model(path):
    gguf = Gguf(path)
    key = {name.removeprefix("llama."): value for name, value in gguf.keys.items()}
    heads, kv_heads = key["attention.head_count"], key["attention.head_count_kv"]
    config = LlamaConfig(
        vocab_size=key["vocab_size"], hidden_size=key["embedding_length"],
        intermediate_size=key["feed_forward_length"], num_hidden_layers=key["block_count"],
        num_attention_heads=heads, num_key_value_heads=kv_heads,
        head_dim=key["attention.key_length"], max_position_embeddings=key["context_length"],
        rms_norm_eps=key["attention.layer_norm_rms_epsilon"],
        rope_parameters={"rope_type": "default", "rope_theta": key["rope.freq_base"]},
        tie_word_embeddings="output.weight" not in gguf.tensors)
    weights = {}
    for name, tensor in gguf.tensors.items():
        if name.endswith(("attn_q.weight", "attn_k.weight")):
            tensor = halves_from_pairs(tensor, heads if "attn_q" in name else kv_heads)
        if name.startswith("blk."):
            _, layer, part, _ = name.split(".")
            name = f"model.layers.{layer}.{LAYER_NAMES[part]}.weight"
        else:
            name = {"token_embd.weight": "model.embed_tokens.weight", "output.weight":
                    "lm_head.weight", "output_norm.weight": "model.norm.weight"}[name]
        weights[name] = torch.from_numpy(np.array(tensor))
    model = LlamaForCausalLM(config).float().eval()
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert set(missing) <= {"lm_head.weight"} and not unexpected
    model.tie_weights()
    ends = {key["tokenizer.ggml.eos_token_id"], key["tokenizer.ggml.eot_token_id"]}
    return model, ends


# --- filler: sentences of a small grammar --------------------------------------------------------

WORDS = {
    "who": "the miller|the ferryman|a tired clerk|my grandmother|the new doctor|an old sailor|"
           "the baker's son|a travelling painter|the schoolmaster|a young engineer|the gardener|"
           "the widow next door|our neighbour|the night watchman|a retired judge|the beekeeper|"
           "a visiting professor|the stable boy|the postman|the lighthouse keeper",
    "did": "walked slowly past|looked for a long time at|had always admired|forgot to mention|"
           "kept a drawing of|wanted to repair|spoke quietly about|could not find|"
           "carefully measured|laughed at|wrote a short letter about|had never trusted|"
           "spent the whole winter thinking about|asked twice about|dreamed of",
    "thing": "the wooden bridge|a faded map|the church bell|an empty barn|the narrow staircase|"
             "a box of nails|the broken clock|the orchard wall|a pair of boots|the iron gate|"
             "the long road to the coast|a borrowed umbrella|the weather|the price of wheat|"
             "an unfinished song|the stone well|a basket of apples|the old quarrel",
    "where": "near the harbour|behind the market|at the edge of the forest|in the upper valley|"
             "beside the canal|under the railway arch|on the far side of the hill|"
             "close to the mill pond|in the back room of the inn|along the north shore",
    "when": "in the early morning|late in autumn|on the second day|after the harvest|"
            "before the snow came|during the long evenings|shortly after noon|"
            "when the fair was over|in the third week of May|at low tide",
    "weather": "rain fell steadily|the wind turned to the west|a thin fog covered the fields|"
               "the heat lay heavily on the roofs|the clouds moved quickly|frost stayed all day|"
               "the sun came out at last|thunder was heard far away",
    "quality": "quiet|expensive|unusual|dusty|crooked|familiar|heavy|well made|older than anyone "
               "remembered|hard to explain|larger than it looked|of little use",
    "said": "nobody was surprised|it made no difference in the end|the matter was soon forgotten|"
            "people still talk about it|that was the usual way of doing things|"
            "there was bread and soup for everyone|the children were sent to bed|"
            "the account books showed nothing|both of them were right|the dog slept by the door",
}
WORDS = {slot: words.split("|") for slot, words in WORDS.items()}
SENTENCES = (
    "{When}, {who} {did} {thing} {where}.",
    "{Who} {did} {thing}, and {said}.",
    "{Weather} {when}, so {who} stayed {where}.",
    "It is true that {thing} was {quality}, but {who} {did} it all the same.",
    "{Thing} {where} was {quality}.",
    "Because {weather}, {said}.",
    "{Who} and {who} met {where} {when}; {said}.",
    "Some say that {who} {did} {thing}, though {said}.",
    "{When} {weather}, and {thing} seemed {quality}.",
    "Nobody {where} knew why {who} {did} {thing}.",
    "If {thing} had been {quality}, {who} would have gone home {when}.",
    "{Weather}.",
)


def sentence(rng):
    class Slots(dict):
        def __missing__(self, slot):
            phrase = rng.choice(WORDS[slot.lower()])
            return phrase[0].upper() + phrase[1:] if slot[0].isupper() else phrase

    return rng.choice(SENTENCES).format_map(Slots())


# --- questions: the forms the model was trained on -----------------------------------------------

CITIES = ("Lisbon Vienna Oslo Cairo Tokyo Boston Lima Geneva Dublin Prague Athens Seoul Toronto "
          "Nairobi Havana Madrid Munich Glasgow").split()
PEOPLE = ("Alice Frank Irene Jack Karen Leo Mary Olga Paul Rose Tom Victor Wendy Clara Hugo Nora "
          "Theo Diana").split()
JOBS = "teacher doctor farmer baker sailor painter lawyer driver pilot singer tailor judge".split()
ANIMALS = "cat dog horse goat rabbit fox wolf bear lion owl parrot turtle".split()
COLORS = "red yellow green blue black white orange purple pink brown gray cyan".split()
ADJECTIVES = ("quick silent golden hidden broken ancient gentle frozen distant clever narrow "
              "rusty").split()
NOUNS = ("river mountain window garden castle letter mirror bottle lantern hammer candle "
         "compass").split()
ACTS = ["walk along the river at sunset", "visit the old museum near the station",
        "drink coffee in a small cafe by the harbor", "buy fresh bread at the morning market",
        "watch the boats from the stone bridge", "climb the tower and look at the city"]


def digits(rng, n):
    return str(rng.randrange(10 ** (n - 1), 10**n))


def passkey(rng, n):
    key = digits(rng, rng.randint(5, 8))
    head = ("There is an important info hidden inside a lot of irrelevant text. Find it and "
            "memorize it. I will quiz you about the important information there.\n\n")
    needle = f"The pass key is {key}. Remember it. {key} is the pass key."
    return head, [needle], "What is the pass key?", f"The pass key is {key}."


def magic(rng, n):
    cities = rng.sample(CITIES, 4)
    values = [digits(rng, rng.randint(5, 7)) for _ in cities]
    head = ("Some special magic numbers are hidden within the following text. Make sure to "
            "memorize them.\n\n")
    needles = [f"One of the special magic numbers for {c} is: {v}." for c, v in zip(cities, values)]
    return (head, needles,
            f"What is the special magic number for {cities[1]} mentioned in the text?",
            f"The special magic number for {cities[1]} is {values[1]}.")


def best_thing(rng, n):
    cities, acts = rng.sample(CITIES, 2), rng.sample(ACTS, 2)
    needles = [f"The best thing to do in {c} is {a}." for c, a in zip(cities, acts)]
    return ("Read the text below and answer the question.\n\n", needles,
            f"What is the best thing to do in {cities[0]}?", needles[0])


def key_value(rng, n):
    """Pairs of random words, about 17 tokens each; no filler."""
    pairs = {}
    while len(pairs) < max(4, n // 17):
        key = f"{rng.choice(ADJECTIVES)}-{rng.choice(NOUNS)}-{digits(rng, 3)}"
        pairs[key] = digits(rng, 5)
    key = rng.choice(list(pairs))
    body = ", ".join(f'"{k}": "{v}"' for k, v in pairs.items())
    return ("JSON data:\n{" + body + "}", None,
            "Extract the value corresponding to the specified key in the JSON object.\n"
            f'Key: "{key}"', f'The value is "{pairs[key]}".')


def two_stage(rng, n):
    """A sum, then a look-up of its result; about 5 tokens an entry, no filler."""
    colors = [rng.choice(COLORS) for _ in range(min(200, max(8, (n - 100) // 5)))]
    total = rng.randrange(len(colors))
    a = rng.randint(0, total)
    body = ", ".join(f"{i}: {c}" for i, c in enumerate(colors))
    head = ("Lets play a game. You have a dict and a mathematical addition equation. The keys of a "
            "dictionary can be any number. You need to find the corresponding key value in the "
            "dictionary after performing the addition and output the value corresponding to that "
            "key. The Dict is ")
    return (head + "{" + body + "}.", None,
            f"The equation is {a} + {total - a} = ? Answer the corresponding color based on the "
            "addition result.",
            f'Since {a} + {total - a} = {total}, the corresponding color is "{colors[total]}".')


def prices(rng, n):
    things = [f"{a} {b}" for a in ADJECTIVES for b in NOUNS]
    things = rng.sample(things, min(len(things), max(4, n // 10)))
    costs = [digits(rng, 4) for _ in things]
    asked = rng.randrange(len(things))
    body = " ".join(f"The {t} costs {c} coins." for t, c in zip(things, costs))
    return ("Here is a price list. " + body, None, f"How much does the {things[asked]} cost?",
            f"The {things[asked]} costs {costs[asked]} coins.")


def hops(rng, n):
    people = rng.sample(PEOPLE, 4)
    cities, jobs = rng.sample(CITIES, 4), rng.sample(JOBS, 4)
    animals = rng.sample(ANIMALS, 4)
    needles = []
    for i, person in enumerate(people):
        needles += [f"{person} lives in {cities[i]}.", f"{person} works as a {jobs[i]}.",
                    f"{person} owns a {animals[i]}.",
                    f"The best friend of {person} is {people[(i + 1) % 4]}."]
    rng.shuffle(needles)
    a, b = people[0], people[1]
    return ("Read the text below and answer the question.\n\n", needles,
            f"What is the job of the best friend of {a}?",
            f"The best friend of {a} is {b}. {b} works as a {jobs[1]}.")


def variables(rng, n):
    names = rng.sample([a + b + c for a in "BDKQ" for b in "AEXZ" for c in "JMTW"], 3)
    value = digits(rng, 5)
    needles = [f"VAR {names[0]} = {value}.", f"VAR {names[1]} = VAR {names[0]}.",
               f"VAR {names[2]} = VAR {names[1]}."]
    return ("Memorize and track the chain of variable assignment hidden in the following text.\n\n",
            needles, f"What is the value of VAR {names[2]}?",
            f"VAR {names[2]} = VAR {names[1]}. VAR {names[1]} = VAR {names[0]}. "
            f"VAR {names[0]} = {value}. The value is {value}.")


PLAN = [  # (kind, tokens wanted)
    (passkey, 100), (hops, 240), (prices, 200), (key_value, 280), (two_stage, 350),
    (magic, 500), (variables, 700), (two_stage, 1000), (best_thing, 900), (prices, 1200),
    (key_value, 1500), (hops, 2000), (passkey, 2500), (variables, 3000), (magic, 3500),
    (key_value, 4000), (best_thing, 5000), (hops, 6000), (magic, 7000), (passkey, 7950),
]


def make_prompt(kind, n_tokens, rng, tokenizer):
    head, needles, question, answer = kind(rng, n_tokens)

    def count(text):
        return len(tokenizer(text, add_special_tokens=False).input_ids)

    if needles is None:
        content = f"{head}\n\n{question}"
    else:
        body, have = [], count(head + " ".join(needles) + question) + 8
        while have < n_tokens:
            body.append(sentence(rng))
            have += count(" " + body[-1])
        places = sorted(rng.randint(0, len(body)) for _ in needles)
        for place, needle in reversed(list(zip(places, needles))):
            body.insert(place, needle)
        content = head + " ".join(body) + f"\n\n{question}"
    ids = tokenizer.apply_chat_template([{"role": "user", "content": content}],
                                        add_generation_prompt=True, return_dict=False)
    return ids, answer


@torch.no_grad()
def answer_greedily(model, ids, ends):
    generated, margins, cache, step = [], [], None, torch.tensor([ids])
    while len(generated) < MAX_NEW and not (generated and generated[-1] in ends):
        out = model(step, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache = out.past_key_values
        top = out.logits[0, -1].topk(2)
        generated.append(int(top.indices[0]))
        margins.append(round(float(top.values[0] - top.values[1]), 3))
        step = torch.tensor([generated[-1:]])
    return generated, margins


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("gguf", type=Path)
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    torch.set_num_threads(2)
    model, ends = load_model(args.gguf)
    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)
    prompts = []
    for number, (kind, n_tokens) in enumerate(PLAN):
        for draw in range(MAX_DRAWS):
            start = time.time()
            ids, expected = make_prompt(kind, n_tokens, random.Random(100 * number + draw),
                                        tokenizer)
            generated, margins = answer_greedily(model, ids, ends)
            if min(margins) >= MIN_MARGIN:
                break
        text = tokenizer.decode(generated, skip_special_tokens=True)
        prompts.append({"kind": kind.__name__, "prompt": ids, "generated": generated,
                        "margins": margins, "text": text, "expected": expected})
        print(f"{kind.__name__:10s} {len(ids):5d} tokens  draw {draw}  margin {min(margins):5.2f}  "
              f"{time.time() - start:4.0f} s  {'ok   ' if text == expected else 'WRONG'} {text!r}",
              flush=True)
    lines = [json.dumps(p, separators=(",", ":")) for p in prompts]
    args.out.write_text('{"model":"' + args.gguf.name + '","prompts":[\n' + ",\n".join(lines) +
                        "\n]}\n")
    right = sum(p["text"] == p["expected"] for p in prompts)
    print(f"{right} of {len(prompts)} right, {args.out.stat().st_size / 1024:.0f} KiB")


if __name__ == "__main__":
    main()
