# SPDX-License-Identifier: Apache-2.0
"""Makes the model folders that every frontend loads offline: a configuration and a tokenizer, no weights.

The tokenizer is a byte-level BPE whose vocabulary is, from FIRST_WORD_ID on, nothing but English words with a leading
space, so that token ids drawn at random read like words. Below are the special tokens, the 256 bytes (so that any text
can be encoded) and pieces of words.

A BPE reaches a word only through a chain of merges, each of which is a token too, so an ordinary training of this size
ends with more pieces than words. Here the pieces are chosen for the number of words that they bring within one merge,
and a word that comes within one merge is taken at once, so that longer words can grow out of it. (The model option
`ignore_merges` would spare the pieces, but only some of the frontends' tokenizer libraries honour it.)

Needs nothing but Python, and the same word lists give the same bytes (about 15 seconds):

    python deploy/make_model.py deploy/model english-words.10 english-words.20 ... english-words.50
    python deploy/make_model.py deploy/model-moe --moe

A word list has one word a line; the earlier a list, the more its words count. deploy/model/README.md names the source.
"""

import argparse
import codecs
import json
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import pairwise
from pathlib import Path
from typing import Final, TypeAlias

VOCAB_SIZE: Final = 32_000
FIRST_WORD_ID: Final = 2_250
MAX_MODEL_LEN_TOKENS: Final = 32_768

WITHIN_REACH_SYMBOLS: Final = 2
"""A word of so many symbols becomes a token by one more merge."""

END_OF_TEXT: Final = "<|endoftext|>"
TURN_START: Final = "<|im_start|>"
TURN_END: Final = "<|im_end|>"
PADDING: Final = "<|pad|>"
CONTROL_TOKENS: Final = (END_OF_TEXT, TURN_START, TURN_END, PADDING)
"""Never part of a text; their ids are 0, 1, 2 and 3."""

MARKER_TOKENS: Final = ("<think>", "</think>", "<tool_call>", "</tool_call>")
"""Part of a reply's text, and single tokens because reasoning parsers look for them by id."""

SHARED_FILES: Final = ("generation_config.json", "tokenizer.json", "tokenizer_config.json")
"""What the mixture-of-experts folder takes from the dense one."""

CHAT_TEMPLATE: Final = """\
{%- if tools %}
    {{- '<|im_start|>system\\nYou may call these functions:\\n<tools>' }}
    {%- for tool in tools %}
        {{- '\\n' + (tool | tojson) }}
    {%- endfor %}
    {{- '\\n</tools>\\nTo call one, write <tool_call>{"name": ..., "arguments": ...}</tool_call>.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.content %}
        {{- message.content }}
    {%- endif %}
    {%- for call in message.tool_calls or [] %}
        {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
        {{- call.function.arguments if call.function.arguments is string else (call.function.arguments | tojson) }}
        {{- '}\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

# In rot13, so that no reader stumbles over them: what no demonstration should print.
_UNWANTED_BEGINNINGS: Final = tuple(
    codecs.decode(
        "nobeg nqhygre nahf ncuebqvf nebhf onjq orurnq ovzob ovfrk oybbqvr oybbql obax obbo obeqryyb obfbz oernfg "
        "oebgury ohttre pnqnire pnfgeng puvax pvephzpvf pyvg pbpnva pbpxrq pbpxvr pbpxvyl pbpxvat pbpxfhpx pbpxl "
        "pbvg pbaphova pbaqbz pbchyng pergva pevccyr pebgpu phaav phag qnza qrpncvg qrsrpng qvpx rwnphy rerpgv "
        "rebgvp rhahpu rkper sntt sntbg sryyng srgvfu sbeavp sevtvq shpx travgny trabpvq tvtbyb tbbx tevatb tebva "
        "uneybg urngura urezncuebqvgr urebva urecrf ubybpnhfg ubzbcubo ubzbfrk ubbxre ubeav ubeal uhffl vqvbg "
        "vzorpvy vzcbgra vaprfg vasnagvpvq wvunq ynfpvi yrpure yrce yrfovna yrjq yvovq yhfgrq yhfgv yhfgf yhfgl "
        "ylapu znfbpu znffnpe znfgheo zvqtrg zbyrfg zbeba zhynggb zheqre zhgvyng anxrq anmv arpebcu arteb avtt "
        "avccyr ahqr ahqv alzcubz bofpra betnf betv betl binevna binevrf binel cnrqb cnyrsnpr cnafv cnafl cncbbfr "
        "cngevpvq crqrenfg crqbcu cravf creiref creireg cunyy cvzcvat cvff cbbs cbea cevpx cebfgvg cehevra chorfp "
        "chovp chxr chxvat chffv chffl dhrre enpvf encr encvat encvfg erpgny erpghz erqarpx ergneq evonyq fnqvf "
        "fnynpv fpebg fphz frqhp frzra frk funt fuvg fynir fynivat fynivfu fyhg fzhg fabg fbqbz fcnfgvp fcrez "
        "fdhnj fgevccr fgehzcrg fhvpvq fhcerznp fjnfgvx flcuvy greebevf grfgvp gvgvyy gvggl gbeghe genaffrk "
        "genafirfg gebyybc hevan hevar hgrev hgrehf intva ivetva ibzvg iblrhe ihyi jrapu jrgonpx jube",
        "rot13",
    ).split()
)
_UNWANTED_WORDS: Final = frozenset(
    codecs.decode(
        "nany nff nffrf onfgneq onfgneqf obare obaref oen oenf ohz ohzf ohgg ohggf pbpx pbpxf pbbyvr pbbyvrf pbba "
        "pbbaf penc penccrq penccvre penccvrfg penccvat penccl pencf phz phzzvat phzf qlxr qlxrf rerpg rerpgf snt "
        "sntf sneg snegrq snegvat snegf sybbml tnlre tnlrfg tnlf tvzcl tlc tlcf tlcfvrf tlcfl ubzb ubzbf uhzc "
        "ulzra ulzraf xvxr xvxrf xvyy xvyyrq xvyyre xvyyref xvyyvat xvyyvatf xvyyf yhfg artebrf cnagvrf crr crrq "
        "crrvat crrf cvzc cvzcrq cvzcf cbbc cbbcrq cbbcvat cbbcf enaql fnintr funttrq fynl fbq fbqf fcvp fcvpf "
        "gneg gnegf gubat gubatf gvg gvgf gbcyrff genzc genzcf gheq gheqf haqvrf jbt jbtf jbc jbcf",
        "rot13",
    ).split()
)

Symbols: TypeAlias = tuple[str, ...]
Pair: TypeAlias = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Merges:
    """What the learning came to: the merges in the order in which a tokenizer tries them, and what each one made."""

    pairs: list[Pair]
    pieces: list[str]
    words: list[str]


def byte_alphabet() -> dict[int, str]:
    """Return the printable character that stands for each byte in a byte-level vocabulary.

    Printable bytes of Latin-1 stand for themselves, the others get the characters from U+0100 on, in order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    moved = {byte: chr(0x100 + position) for position, byte in enumerate(others)}
    return {byte: moved.get(byte, chr(byte)) for byte in range(256)}


def read_words(lists: Iterable[Path]) -> dict[str, int]:
    """Return the usable words, the most common first, each with the number of its list (0 is the first)."""
    words: dict[str, int] = {}
    for number, path in enumerate(lists):
        lines = set(path.read_text(encoding="utf-8").split())
        usable = [word for word in lines if re.fullmatch(r"[a-z]{2,}", word) and not _is_unwanted(word)]
        for word in sorted(usable, key=lambda word: (len(word), word)):
            words.setdefault(word, number)
    return words


class Learner:
    """Finds the merges: keeps every word as the symbols that the merges so far leave of it."""

    def __init__(self, words: Mapping[str, int]) -> None:
        space = byte_alphabet()[ord(" ")]
        self._symbols: list[Symbols] = [(space, *word) for word in words]
        longest = max((len(symbols) for symbols in self._symbols), default=0)
        lists = max(words.values(), default=0) + 1
        # A word of n symbols is n - 2 pieces away from being taken. It counts 4 times less for each of them, and 10
        # times less for each list that comes before its own. Integers, because sums of floats depend on their order.
        self._worth = [10 ** (lists - 1 - number) << 2 * longest for number in words.values()]
        self._score: Counter[Pair] = Counter()
        self._holders: defaultdict[Pair, set[int]] = defaultdict(set)
        for index in range(len(self._symbols)):
            self._count(index, 1)
        self._best = [(-score, pair) for pair, score in self._score.items()]
        heapify(self._best)
        self._within_reach: list[int] = []
        self._made: set[str] = set()

    def learn(self, piece_count: int, word_count: int) -> Merges:
        """Return merges for that many pieces and words; SystemExit when the lists have too few words for it."""
        merges = Merges([], [], [])
        while len(merges.words) < word_count or len(merges.pieces) < piece_count:
            if self._within_reach and len(merges.words) < word_count:
                index = heappop(self._within_reach)
                if len(self._symbols[index]) == 1:
                    continue
                pair = (self._symbols[index][0], self._symbols[index][1])
                made = merges.words
            elif len(merges.pieces) < piece_count and (piece := self._next_piece()):
                pair = piece
                made = merges.pieces
            else:
                sys.exit(
                    f"the word lists give {len(merges.words)} words and {len(merges.pieces)} pieces, but {word_count} "
                    f"and {piece_count} are needed (add a list of rarer words)"
                )
            merges.pairs.append(pair)
            made.append(pair[0] + pair[1])
            self._apply(pair)
        return merges

    def _next_piece(self) -> Pair | None:
        """Return the pair that brings most words closer, and that makes a token which is not there yet."""
        while self._best:
            score, pair = heappop(self._best)
            if -score == self._score[pair] and pair[0] + pair[1] not in self._made:
                return pair
        return None

    def _apply(self, pair: Pair) -> None:
        """Merge the pair in every word that has it, and note what that changes for other pairs."""
        self._made.add(pair[0] + pair[1])
        changed: set[Pair] = set()
        for index in self._holders.pop(pair):
            before, after = self._symbols[index], _merge(self._symbols[index], pair)
            if before == after:
                continue
            self._count(index, -1)
            self._symbols[index] = after
            self._count(index, 1)
            changed.update(pairwise(before), pairwise(after))
            if len(after) == WITHIN_REACH_SYMBOLS:
                heappush(self._within_reach, index)
        for other in changed:
            if self._score[other] > 0:
                heappush(self._best, (-self._score[other], other))

    def _count(self, index: int, sign: int) -> None:
        """Add a word's worth to the score of each of its pairs, or take it away."""
        symbols = self._symbols[index]
        worth = sign * (self._worth[index] >> 2 * len(symbols))
        for pair in set(pairwise(symbols)):
            self._score[pair] += worth
            if sign > 0:
                self._holders[pair].add(index)


def build_vocabulary(words: Mapping[str, int]) -> tuple[dict[str, int], list[Pair]]:
    """Return the vocabulary, ids ascending, and the merges that reach it."""
    single = [*CONTROL_TOKENS, *MARKER_TOKENS, *byte_alphabet().values()]
    merges = Learner(words).learn(FIRST_WORD_ID - len(single), VOCAB_SIZE - FIRST_WORD_ID)
    by_rank = {word: rank for rank, word in enumerate(words)}
    ordered = sorted(merges.words, key=lambda spelling: by_rank[spelling[1:]])
    tokens = [*single, *merges.pieces, *ordered]
    return {token: number for number, token in enumerate(tokens)}, merges.pairs


def tokenizer(vocabulary: dict[str, int], merges: Sequence[Pair]) -> dict[str, object]:
    """Return the content of tokenizer.json."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_added_token(token, vocabulary[token]) for token in (*CONTROL_TOKENS, *MARKER_TOKENS)],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocabulary,
            "merges": [f"{left} {right}" for left, right in merges],
        },
    }


def tokenizer_config(vocabulary: dict[str, int]) -> dict[str, object]:
    """Return the content of tokenizer_config.json."""
    added = {}
    for token in (*CONTROL_TOKENS, *MARKER_TOKENS):
        entry = _added_token(token, vocabulary[token])
        added[str(entry.pop("id"))] = entry
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": False,
        "bos_token": END_OF_TEXT,
        "eos_token": TURN_END,
        "pad_token": PADDING,
        "unk_token": None,
        "clean_up_tokenization_spaces": False,
        "model_max_length": MAX_MODEL_LEN_TOKENS,
        "added_tokens_decoder": added,
        "chat_template": CHAT_TEMPLATE,
    }


def generation_config(vocabulary: dict[str, int]) -> dict[str, object]:
    """Return the content of generation_config.json: the end of a turn, and with it the end of a text, ends a reply."""
    return {
        "bos_token_id": vocabulary[END_OF_TEXT],
        "eos_token_id": [vocabulary[TURN_END], vocabulary[END_OF_TEXT]],
        "pad_token_id": vocabulary[PADDING],
    }


def model_config(*, mixture_of_experts: bool) -> dict[str, object]:
    """Return the content of config.json: the shape of a small Llama, or of a small Mixtral."""
    config: dict[str, object] = {
        "architectures": ["MixtralForCausalLM" if mixture_of_experts else "LlamaForCausalLM"],
        "model_type": "mixtral" if mixture_of_experts else "llama",
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": MAX_MODEL_LEN_TOKENS,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-05,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "bos_token_id": CONTROL_TOKENS.index(END_OF_TEXT),
        "eos_token_id": CONTROL_TOKENS.index(TURN_END),
        "pad_token_id": CONTROL_TOKENS.index(PADDING),
    }
    experts: dict[str, object] = {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None}
    return config | experts if mixture_of_experts else config


def _is_unwanted(word: str) -> bool:
    return word in _UNWANTED_WORDS or word.startswith(_UNWANTED_BEGINNINGS)


def _merge(symbols: Symbols, pair: Pair) -> Symbols:
    """Return the symbols with every occurrence of the pair replaced by its concatenation, from the left."""
    merged: list[str] = []
    position = 0
    while position < len(symbols):
        if symbols[position : position + 2] == pair:
            merged.append(pair[0] + pair[1])
            position += 2
        else:
            merged.append(symbols[position])
            position += 1
    return tuple(merged)


def _added_token(content: str, number: int) -> dict[str, object]:
    """Describe a token that text is searched for before anything else; a special one is hidden from replies."""
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"id": number, "content": content, **plain, "special": content in CONTROL_TOKENS}


def _write_json(path: Path, content: object, *, indent: int) -> None:
    """Write JSON that a diff can show line by line; with indent 0 a large file stays small."""
    separators = (",", ":") if indent == 0 else None
    text = json.dumps(content, indent=indent, separators=separators, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")
    print(f"{path}: {path.stat().st_size} bytes")


def main() -> None:
    """Write the folder that the command line asks for."""
    parser = argparse.ArgumentParser(description="Make a model folder without weights.")
    parser.add_argument("folder", type=Path, help="the folder to write, made when it is not there")
    parser.add_argument("lists", nargs="*", type=Path, metavar="WORD_LIST", help="word lists, most common words first")
    parser.add_argument("--moe", action="store_true", help="a mixture of experts; its tokenizer is linked to ../model")
    arguments = parser.parse_args()
    if arguments.moe == bool(arguments.lists):
        parser.error("give word lists, or --moe, which takes the tokenizer of the folder ../model")
    folder: Path = arguments.folder
    folder.mkdir(parents=True, exist_ok=True)
    _write_json(folder / "config.json", model_config(mixture_of_experts=arguments.moe), indent=2)
    if arguments.moe:
        for name in SHARED_FILES:
            (folder / name).unlink(missing_ok=True)
            (folder / name).symlink_to(Path("..") / "model" / name)
    else:
        vocabulary, merges = build_vocabulary(read_words(arguments.lists))
        _write_json(folder / "tokenizer.json", tokenizer(vocabulary, merges), indent=0)
        _write_json(folder / "tokenizer_config.json", tokenizer_config(vocabulary), indent=2)
        _write_json(folder / "generation_config.json", generation_config(vocabulary), indent=2)


if __name__ == "__main__":
    main()
