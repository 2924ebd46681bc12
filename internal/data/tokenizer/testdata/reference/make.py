#!/usr/bin/env python3
"""Creates the reference data of the tests: small tokenizers with the whole pipeline of each model family, strings, and
the results of the original libraries for them. It needs the Python packages tokenizers (0.23) and sentencepiece (0.2).

    python3 make.py train DIR                      writes the tokenizers into DIR
    python3 make.py strings DIR N SEED OUT.gz      writes N strings with the checksums of their IDs, for the tokenizers in DIR
    python3 make.py characters OUT.gz              writes how the expressions and normal forms treat every character

These commands created the committed files:

    python3 make.py train . && python3 make.py strings . 2500 1 strings.gz && python3 make.py characters characters.gz
"""
import base64, glob, gzip, io, json, os, random, struct, sys, zlib

import sentencepiece
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
TEKKEN = (r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+"
          r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+")
O200K = (r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?"
         r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|"
         r"\s*[\r\n]+|\s+(?!\S)|\s+")
DEEPSEEK = [r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+",
            r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"]

WORDS = """the and of to in is that for it as was with be by on not he his but at are this have from or had an they which one you were all her
she there would their we him been has when who will no more if out so up said what its about than into them can only other time new some
could these two may first then do any like my now over such our man me even most made after also did many off before must well back through
years where much your way down should because long each just state those people too mr how little good world make very year still see own work
men day get here between both life being under three never know same last another while us might great old against go came since come right take
I'm you're it's don't WE'LL he'd they've O'Neill can't I'D func return if err != nil { } for i := range x def self.print("hello, world") -> None:
import torch; x = x.view(-1, 12) << 3; const std::vector<int>& v; 0x1F 3.14159 1,000,000 2024-11-22T10:00:00Z user@example.org https://example.org/a?b=c&d=e
Größe über straße naïve café jalapeño año élève garçon œuvre þetta łódź žluťoučký kůň İstanbul ığdır ſoft Ǆ ǅ
Привет мир как дела сегодня хорошая погода человек время Γειά σου κόσμε καλημέρα ωραία שלום עולם מה שלומך مرحبا بالعالم كيف حالك اليوم
नमस्ते दुनिया आप कैसे हैं হ্যালো বিশ্ব வணக்கம் உலகம் สวัสดีชาวโลก ສະບາຍດີ မင်္ဂလာပါ გამარჯობა բարեւ አማርኛ ᠮᠣᠩᠭᠣᠯ
你好世界今天天气很好我们去公园吧中文分词测试 こんにちは世界今日はいい天気ですねカタカナテスト 안녕하세요 세계 오늘 날씨가 좋네요
😀 😂 👍🏽 👩‍👩‍👧‍👦 🏳️‍🌈 🇩🇪 ☕️ → ≠ ∑ √ € £ ¥ № … – — “quoted” ‘single’ «guillemets» ½ ² ³ Ⅷ ①""".split()

ADDED = [AddedToken("<|im_start|>", special=True, normalized=False), AddedToken("<|im_end|>", special=True, normalized=False),
         AddedToken("<tool>", lstrip=True, normalized=False), AddedToken("</tool>", rstrip=True, normalized=False),
         AddedToken("[MASK]", lstrip=True, rstrip=True, special=True, normalized=False),
         AddedToken("word", single_word=True, normalized=False), AddedToken("Ünit", normalized=True), AddedToken("<think>", normalized=True),
         AddedToken("<|im", normalized=False), AddedToken("  ", normalized=False)]


def corpus():
    r = random.Random(0)
    lines = []
    for _ in range(3000):
        n = r.randint(1, 20)
        lines.append("".join(r.choice(WORDS) + r.choice([" "] * 12 + ["\n", "  ", "\t", "", ", ", ". "]) for _ in range(n)))
    return lines


def pipelines():
    """Yields name, tokenizer without vocabulary, initial alphabet, unknown token or None, added tokens."""
    level = sorted(pre_tokenizers.ByteLevel.alphabet())
    fallback = ["<unk>", "<s>", "</s>"] + ["<0x%02X>" % b for b in range(256)]

    def make(name, normalizer, pre, post, decoder, special, added=(), **model):
        t = Tokenizer(models.BPE(**model))
        if normalizer: t.normalizer = normalizer
        if pre: t.pre_tokenizer = pre
        if post: t.post_processor = post
        t.decoder = decoder
        return name, t, special, list(added)

    split = lambda p: pre_tokenizers.Split(Regex(p), "isolated")
    raw = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    both = lambda *p: pre_tokenizers.Sequence(list(p))
    byte = decoders.ByteLevel()
    bos = lambda t, i: processors.TemplateProcessing(single=f"{t} $A", pair=f"{t} $A {t}:1 $B:1", special_tokens=[(t, i)])
    yield make("gpt2", None, pre_tokenizers.ByteLevel(add_prefix_space=False), processors.ByteLevel(trim_offsets=False), byte, ["<|endoftext|>"])
    yield make("llama3", None, both(split(LLAMA3), raw), processors.Sequence([processors.ByteLevel(trim_offsets=False), bos("<|begin|>", 0)]), byte,
               ["<|begin|>", "<|end|>"], ADDED, ignore_merges=True)
    yield make("qwen2", normalizers.NFC(), both(split(QWEN), raw), processors.ByteLevel(trim_offsets=False), byte, ["<|endoftext|>"], ADDED)
    yield make("tekken", None, both(split(TEKKEN), raw), bos("<s>", 0), byte, ["<s>", "</s>"], ADDED[:3], ignore_merges=True)
    yield make("o200k", None, both(split(O200K), raw), None, byte, ["<|endoftext|>"], ADDED[3:])
    yield make("smollm", None, both(pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=True)), None, byte,
               ["<|endoftext|>"], ADDED)
    yield make("deepseek", normalizers.Sequence([]), both(*map(split, DEEPSEEK), raw), bos("<s>", 0), byte, ["<s>"], ADDED)
    yield make("llama2", normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]), None, bos("<s>", 1),
               decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]),
               fallback, ADDED, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    yield make("gemma", normalizers.Replace(" ", "▁"), pre_tokenizers.Split(" ", "merged_with_previous"), bos("<s>", 1),
               decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]),
               fallback, ADDED, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    yield make("metaspace", normalizers.NFKC(), pre_tokenizers.Metaspace(prepend_scheme="first"), bos("<s>", 1),
               decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]), ["<unk>", "<s>"], ADDED, unk_token="<unk>")


def train(folder):
    lines = corpus()
    level = pre_tokenizers.ByteLevel.alphabet()
    for name, t, special, added in pipelines():
        is_level = isinstance(t.decoder, decoders.ByteLevel)
        trainer = trainers.BpeTrainer(vocab_size=700 if is_level else 900, special_tokens=special, initial_alphabet=level if is_level else [],
                                      limit_alphabet=1000 if is_level else 250, show_progress=False)
        pre = t.pre_tokenizer
        if pre is None or name == "gemma":  # without pieces the trainer would learn whole lines
            t.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
        t.train_from_iterator(lines, trainer)
        text = json.loads(t.to_str())
        if pre is None:
            text["pre_tokenizer"] = None
        elif name == "gemma":
            text["pre_tokenizer"] = json.loads(pre.__getstate__())
        t = Tokenizer.from_str(json.dumps(text))
        if name not in ("gpt2",):
            t.add_tokens(added)
        if name in ("qwen2", "llama3"):
            t.add_special_tokens(["<|last|>"])
        text = json.loads(t.to_str())
        if name in ("gpt2", "llama2"):  # as older versions wrote them
            text["model"]["merges"] = [" ".join(m) for m in text["model"]["merges"]]
        with open(os.path.join(folder, name + ".json"), "w", encoding="utf-8") as f:
            json.dump(text, f, ensure_ascii=False, separators=(",", ":"))
    spm = {"sp_llama2": dict(add_dummy_prefix=True, remove_extra_whitespaces=False, byte_fallback=True),
           "sp_gemma": dict(add_dummy_prefix=False, remove_extra_whitespaces=False, byte_fallback=True,
                            user_defined_symbols=["<start_of_turn>", "\n\n", "  ", "▁▁▁", "<b>"]),
           "sp_squeeze": dict(add_dummy_prefix=True, remove_extra_whitespaces=True, byte_fallback=False)}
    for name, options in spm.items():
        out = io.BytesIO()
        sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(lines), model_writer=out, vocab_size=800, model_type="bpe",
            normalization_rule_name="identity", character_coverage=0.98, split_digits=True, allow_whitespace_only_pieces=True,
            max_sentence_length=1 << 20, num_threads=1, minloglevel=2, **options)
        with open(os.path.join(folder, name + ".model"), "wb") as f:
            f.write(out.getvalue())


BLOCKS = [(0, 0x80), (0, 0x20), (0x80, 0x100), (0x100, 0x250), (0x250, 0x370), (0x300, 0x370), (0x370, 0x530), (0x530, 0x800), (0x800, 0xe00),
          (0xe00, 0x1100), (0x1100, 0x1200), (0x1200, 0x1e00), (0x1e00, 0x2000), (0x2000, 0x2070), (0x2070, 0x2e80), (0x2e80, 0xa000),
          (0xa000, 0xac00), (0xac00, 0xd800), (0xe000, 0xf900), (0xf900, 0x10000), (0x10000, 0x11000), (0x11000, 0x14000), (0x14000, 0x1f000),
          (0x1f000, 0x1fb00), (0x20000, 0x30000), (0xe0000, 0x110000)]
SPACES = [" ", "\t", "\n", "\r", "\r\n", "\u00a0", "\u3000", "\u2028", "\x85", "\u200b", "\u180e", "\x1c", "▁", "\v", "\f"]
PIECES = ["'s", "'S", "'ſ", "'LL", "'Re", "ve", "ŋ", "1", "12", "1234567", "٣٤", "½", "Ġ", "Ċ", "<0x0A>", "<unk>", "<s>", "</s>", "<|endoftext|>", "<|begin|>",
          "<|last|>", "word", "words", "Ünit", "U\u0308nit", "<think>", "[MASK]", "<tool>", "</tool>", "<|im_start|>", "<|im_end|>", "<|im", "<start_of_turn>",
          "\ud55c\u1100\u1161\u11a8", "e\u0301", "\u0301", "q\u0323\u0307", "\u1e9b\u0323", "ﬁ", "\u11935\u11930", "\U00011935\U00011930", "\u0898\u0301"]


def string(r):
    out = []
    for _ in range(r.choice([1, 1, 2, 3, 5, 8, 12, 20])):
        kind = r.randrange(14)
        if kind < 4:
            out.append(r.choice(WORDS) + r.choice([" ", " ", " ", "", "\n"]))
        elif kind < 6:
            lo, hi = r.choice(BLOCKS)
            for _ in range(r.randint(1, 12)):
                c = r.randrange(lo, hi)
                out.append(chr(c) if not 0xd800 <= c < 0xe000 else "\ufffd")
        elif kind < 8:
            out.append(r.choice(SPACES) * r.choice([1, 1, 2, 3, 5, 17, 64]))
        elif kind < 11:
            out.append(r.choice(["", " ", "  ", "\n"]) + r.choice(PIECES) + r.choice(["", " ", "   ", "\t"]))
        elif kind == 11:
            out.append("".join(chr(r.randrange(0x300, 0x370)) for _ in range(r.choice([1, 2, 5, 45]))))
        elif kind == 12:
            out.append("".join(r.choice(WORDS)[:r.randint(1, 3)] for _ in range(r.randint(1, 8))))
        else:
            out.append(chr(r.randrange(0x20, 0x110000 - 0x800)) if r.random() < .5 else "a" + chr(r.choice([0x0, 0x1, 0x7f, 0xfeff, 0xfffe, 0xffff, 0x10ffff])))
    s = "".join(out).encode("utf-8", "replace").decode("utf-8")
    if r.random() < 0.002:
        s += " " * 20000 + "x" * r.choice([1, 9000])
    return s.encode()


def packed(ids):
    return struct.pack("<%dI" % len(ids), *ids)


def strings(folder, n, seed, out):
    r = random.Random(seed)
    tokenizers = []
    for path in sorted(glob.glob(os.path.join(folder, "*.json"))):
        t = Tokenizer.from_file(path)
        tokenizers.append((os.path.basename(path), lambda s, t=t: t.encode(s).ids, lambda s, t=t: t.encode(s, add_special_tokens=False).ids,
                           lambda ids, t=t: t.decode(ids, skip_special_tokens=True)))
    for path in sorted(glob.glob(os.path.join(folder, "*.model"))):
        t = sentencepiece.SentencePieceProcessor(model_file=path)
        tokenizers.append((os.path.basename(path), t.encode, t.encode, t.decode))
    with gzip.GzipFile(out, "wb", mtime=0) as f:
        f.write(json.dumps([name for name, *_ in tokenizers]).encode() + b"\n")
        for i in range(n):
            b = string(r)
            if i % 10 == 9:  # invalid UTF-8: cut, or with bytes changed
                b = bytearray(b[:400])
                for _ in range(r.randint(1, 4)):
                    if b: b[r.randrange(len(b))] = r.randrange(0x80, 0x100)
                b = bytes(b[r.randint(0, 2):])
            s = b.decode("utf-8", "replace")
            sums = []
            for _, encode, plain, decode in tokenizers:
                ids = plain(s)
                sums.append(zlib.crc32(packed(encode(s)) + packed(ids) + decode(ids).encode()))
            f.write(base64.b64encode(b) + b"\t" + base64.b64encode(struct.pack("<%dI" % len(sums), *sums)) + b"\n")


CLASSES = [r"\p{L}", r"\p{N}", r"\s", r"\S", r"\d", r"\D", r"\p{Lu}", r"\p{Ll}", r"\p{Lt}", r"\p{Lm}", r"\p{Lo}", r"\p{M}", r"\p{P}", r"\p{S}", r"\P{L}",
           r"[^\s\p{L}\p{N}]", r"[^\r\n\p{L}\p{P}\p{S}]", r"\p{Pd}", r"\p{Po}", r"\p{Sm}", r"\p{So}", r"\p{Nd}", r"\p{No}", r"\p{Z}", "."]


def characters(out):
    all = [chr(c) for c in range(1, 0x32400) if not 0xd800 <= c < 0xe000]  # no character after these is of interest
    text = "".join(all)
    lines = []

    def add(kind, what, found):
        runs = []
        for c in found:
            if runs and runs[-1][1] == c - 1: runs[-1][1] = c
            else: runs.append([c, c])
        lines.append(json.dumps([kind, what, runs], separators=(",", ":")))

    for p in CLASSES:
        rest = set("".join(x for x, _ in pre_tokenizers.Split(Regex(p), "removed").pre_tokenize_str(text)))
        add("class", p, [ord(c) for c in all if c not in rest])
    for p in [r"(?i:'s)", r"(?i:'t|'re|'ve|'m|'ll|'d)"]:
        add("quote", p, [ord(c) for c in all if not pre_tokenizers.Split(Regex(p), "removed").pre_tokenize_str("'" + c)])
    add("digits", "", [ord(c) for c in all if len(pre_tokenizers.Digits(True).pre_tokenize_str("a" + c)) == 2])
    t = Tokenizer(models.BPE(vocab={"b": 0}, merges=[]))
    t.add_tokens([AddedToken("a", single_word=True)])
    add("word", "", [ord(c) for c in all if 1 not in t.encode("a" + c).ids])
    for name, form in (("NFC", normalizers.NFC()), ("NFD", normalizers.NFD()), ("NFKC", normalizers.NFKC()), ("NFKD", normalizers.NFKD())):
        # beside letters and marks that show class, composition and order
        around = [("", ""), ("a\u0345", "\u0301"), ("\U00011935", "\u0323")]
        for i in range(0, len(all), 256):
            block = "\n".join(form.normalize_str(a + c + b) for c in all[i:i + 256] for a, b in around)
            lines.append(json.dumps(["form", name, ord(all[i]), zlib.crc32(block.encode())], separators=(",", ":")))
    with gzip.GzipFile(out, "wb", mtime=0) as f:
        f.write("\n".join(lines).encode())


if __name__ == "__main__":
    if sys.argv[1] == "train":
        train(sys.argv[2])
    elif sys.argv[1] == "strings":
        strings(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5])
    else:
        characters(sys.argv[2])
