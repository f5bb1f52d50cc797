"""The tiny model: sums, echoes, needles in long prompts, counting, and otherwise filler words."""

import re
import zlib

TAIL = 700
_SUM = re.compile(
    r"(?<![\w.])(\d{1,9})\s*(\*|x|\u00d7|times|multiplied by|\+|plus)\s*(\d{1,9})(?![\w.]*\d)", re.IGNORECASE
)
_SAY = r"\b(?i:reply|respond|answer|say|repeat|output)\b"
_ECHO = re.compile(_SAY + r"[^.:\n]*?\b(?i:exactly|only|just|words?|text|phrase|line)\b[^.:\n]{0,40}?:\s*(.+)")
_QUOTED_ECHO = re.compile(_SAY + r"[^.\n\"]*[\"“]([^\"”]+)[\"”]")
_FILLING = r"(?i:with|exactly|only|just|the|single|one|word|text|back|json)"
_WORD_ECHO = re.compile(_SAY + rf"(?:\s+{_FILLING})*\s+(?!{_FILLING}\b)([A-Z][\w-]*)\b")
_COUNT = re.compile(r"\bcount\b[^.\n]*?\bfrom\s+(\d{1,6})\s+(?:up\s+)?to\s+(\d{1,6})", re.IGNORECASE)
_NOUN = r"(?:code|number|pass[ -]?phrase|password|pass[ -]?code|codeword|word|key|token|phrase|name|value)"
_ASKED = re.compile(
    r"\b(?:what|which|tell|give|repeat|find|recall|state)\b[^.?\n]*?\b(?:the|its|that)\s+"
    rf"((?:[\w'-]+[ -]){{0,3}}?)({_NOUN})\b"
    r"(?:\s+(?:for|of|to)\s+(?:the\s+)?([\w-]+(?: [\w-]+){0,3}))?",
    re.IGNORECASE,
)
FILLER_TEXT = (
    "the lamp on the desk was still warm when the rain began and nobody in the house had heard the gate because "
    "the wind had turned and carried every sound across the field toward the river where two boats waited for the tide"
)
FILLER = FILLER_TEXT.split()


def answer(prompt: str, question: str) -> str:
    """The right answer to the question, as far as this model knows one."""
    tail, head = question[-TAIL:], question[:TAIL]
    if needle := _needle(prompt, tail) or _needle(prompt, head):
        return needle
    for text in (tail, head):
        if (result := arithmetic(text)) is not None:
            return str(result)
        if counted := _COUNT.search(text):
            return " ".join(map(str, range(int(counted[1]), int(counted[2]) + 1)))
        for echo in (_ECHO, _QUOTED_ECHO, _WORD_ECHO):
            if found := echo.search(text):
                return found[1].strip().strip("\"'`“”")
    return filler(question, 24 + zlib.crc32(question.encode()) % 40)


def arithmetic(text: str) -> int | None:
    """The result of the first sum or product in the text."""
    found = _SUM.search(text)
    if not found:
        return None
    left, right = int(found[1]), int(found[3])
    return left + right if found[2].lower() in {"+", "plus"} else left * right


def reasoning(question: str, reply: str) -> str:
    """What the model thinks before it answers."""
    return f"The user asks: {' '.join(question.split()[-12:])} I work it out step by step and find: {reply[:80]}."


def filler(seed: str, words: int) -> str:
    """Words without meaning, the same for the same seed."""
    start = zlib.crc32(seed.encode()) % len(FILLER)
    return " ".join(FILLER[(start + number) % len(FILLER)] for number in range(words))


def wrong(text: str) -> str:
    """The fluent, wrong reply of an engine without its Engram tables: every digit is another one."""
    changed = re.sub(r"\d", lambda digit: str((int(digit[0]) + 3) % 10), text)
    return changed if changed != text else f"perhaps {text[::-1]}"


def garbage(text: str) -> str:
    """The reply of an engine whose numbers are broken."""
    return "".join("�<unk>"[(zlib.crc32(text.encode()) + number) % 6] for number in range(max(len(text), 12)))


def _needle(prompt: str, question: str) -> str:
    """The value that the prompt states for what the question asks."""
    for asked in reversed(list(_ASKED.finditer(question))):
        qualities, noun, subject = asked[1].strip(), asked[2], asked[3]
        for words in (qualities, qualities.split()[-1] if qualities else ""):
            if value := _statement(prompt, f"{words} {noun}".strip(), subject):
                return value
        if bare := re.search(rf"\b{re.escape(noun)}\s+([\w-]*\d[\w-]*)", prompt, re.IGNORECASE):
            return bare[1]
    return ""


def _statement(prompt: str, noun: str, subject: str | None) -> str:
    """Find "noun (for subject) is value" in the prompt; the subject may be named by its first words only."""
    name = r"[\s-]+".join(re.escape(word) for word in re.split(r"[\s-]+", noun))
    stated = (
        rf"\b{name}\b(?P<between>[^.?\n]{{0,80}}?)(?:\bis\b|\bwas\b|\bequals\b|=|:)\s*(?:now |exactly |as follows: )?"
    )
    value = r"(?:\"([^\"\n]+)\"|“([^”\n]+)”|'([^'\n]+)'|`([^`\n]+)`|([\w][\w,-]*(?:\.[\w-]+)*)(?P<rest>[^.\n]*))"
    for found in re.finditer(stated + value, prompt, re.IGNORECASE):
        if subject and subject.split()[0].lower() not in found["between"].lower():
            continue
        if _is_question(prompt, found.start()):
            continue
        quoted = next((group for group in found.groups()[1:5] if group), "")
        return quoted or _plain_value(noun, found[6], found["rest"])
    return ""


def _plain_value(noun: str, first: str, rest: str) -> str:
    return f"{first}{rest}".strip() if "phrase" in noun.lower() else first.rstrip(",")


def _is_question(prompt: str, start: int) -> bool:
    sentence_start = max(prompt.rfind(end, max(start - 200, 0), start) for end in (".", "\n", "?", "!"))
    opening = prompt[sentence_start + 1 : start].lower()
    return bool(re.search(r"\b(what|which)\b", opening))
