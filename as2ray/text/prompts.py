"""Prompts of decoders: how the text of a pair is divided into parts that are tokenized apart.

Byte-pair encoding merges characters across the joints of a prompt: "?" and a line break behind it
are one token. So a question and a candidate are tokenized with the text around them, up to places
where tokens end whatever the texts are.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from as2ray.errors import ConfigError

QUESTION_FIELD, CANDIDATE_FIELD = "{question}", "{candidate}"
INSTRUCTION_FIELD = "{instruction}"

PROBES = ("a", "Wh?", "x ", " x", "12", "a.", "é", "-\n", "'s", "ab:", "\u4e00", "(")
"""Texts with which is tried whether tokens end at a place."""


@dataclass(frozen=True)
class PromptParts:
    """A prompt in parts whose token ids, one after the other, are those of the whole prompt."""

    before: tuple[str, ...]
    """Texts before the question's part."""
    question: tuple[str, str]
    """Text before and after the question in its part."""
    between: tuple[str, ...]
    """Texts between both parts."""
    candidate: str
    """Text before the candidate in its part, which ends with the candidate."""
    after: tuple[str, ...]
    """Texts after the candidate's part."""


def divide_prompt(
    prompt: Sequence[str], instruction: str, splits: Callable[[str, str], bool]
) -> PromptParts:
    """Divides a prompt such that its parts can be tokenized apart.

    Args:
        prompt: Segments that the model's own code tokenizes apart, too. The question, then the
            candidate stand once in one of them, as `{question}` and `{candidate}`.
        instruction: Stands for `{instruction}`.
        splits: Returns whether tokens end between two texts; see `ends_tokens`.

    Raises:
        ConfigError: A field is missing or repeated, the candidate comes first, or the tokens of a
            candidate depend on the text after it, so that it could not be truncated.
    """
    segments = [segment.replace(INSTRUCTION_FIELD, instruction) for segment in prompt]
    whole = "".join(segments)
    counts = [whole.count(field) for field in (QUESTION_FIELD, CANDIDATE_FIELD)]
    if counts != [1, 1] or whole.index(QUESTION_FIELD) > whole.index(CANDIDATE_FIELD):
        raise ConfigError(
            f"prompt {list(prompt)} must contain {QUESTION_FIELD} and, after it, {CANDIDATE_FIELD}"
        )
    where = [
        next(i for i, segment in enumerate(segments) if field in segment)
        for field in (QUESTION_FIELD, CANDIDATE_FIELD)
    ]
    before, between = tuple(segments[: where[0]]), tuple(segments[where[0] + 1 : where[1]])
    after = segments[where[1] + 1 :]
    question_head, question_tail = segments[where[0]].split(QUESTION_FIELD)
    if where[0] == where[1]:
        joint, candidate_tail = question_tail.split(CANDIDATE_FIELD)
        question = question_head + QUESTION_FIELD
        place = _last_boundary(question, joint, CANDIDATE_FIELD, splits)
        question_tail, candidate_head = joint[:place], joint[place:]
    else:
        candidate_head, candidate_tail = segments[where[1]].split(CANDIDATE_FIELD)
        place = _last_boundary("", candidate_head, CANDIDATE_FIELD, splits)
        between = (*between, candidate_head[:place])
        candidate_head = candidate_head[place:]
    if candidate_tail:
        if not _always_splits(candidate_head + CANDIDATE_FIELD, candidate_tail, splits):
            raise ConfigError(
                f"prompt {list(prompt)}: the tokens of a candidate depend on the text after it, "
                f"{candidate_tail[:40]!r}",
                fix="put a special token after the candidate, or make the text a segment",
            )
        after = [candidate_tail, *after]
    place = _last_boundary("", question_head, QUESTION_FIELD, splits)
    before, question_head = (*before, question_head[:place]), question_head[place:]
    return PromptParts(
        before, (question_head, question_tail), between, candidate_head, tuple(after)
    )


def _last_boundary(left: str, joint: str, right: str, splits: Callable[[str, str], bool]) -> int:
    """Returns the last place in a joint where tokens end, whatever stands for the fields."""
    for place in range(len(joint), -1, -1):
        if _always_splits(left + joint[:place], joint[place:] + right, splits):
            return place
    raise ConfigError(
        f"prompt: between {left[-40:]!r} and {right!r} there is no place where tokens always end"
    )


def _always_splits(left: str, right: str, splits: Callable[[str, str], bool]) -> bool:
    """Returns whether tokens end between two texts, whatever stands for the fields."""
    probes = [
        PROBES if field in left + right else ("",) for field in (QUESTION_FIELD, CANDIDATE_FIELD)
    ]
    return not left or all(
        splits(
            *(
                text.replace(QUESTION_FIELD, question).replace(CANDIDATE_FIELD, candidate)
                for text in (left, right)
            )
        )
        for question, candidate in product(*probes)
    )


def ends_tokens(tokenizer: Any, left: str, right: str) -> bool:
    """Returns whether tokens end between two texts, for a reason that holds for similar texts.

    Tokens end at special tokens, and where the tokenizer divides text into words before it merges.

    Args:
        tokenizer: A `tokenizers.Tokenizer`.
        left: A text.
        right: The text after it.
    """
    special = [token.content for token in tokenizer.get_added_tokens_decoder().values()]
    if not any(left.endswith(token) or right.startswith(token) for token in special):
        words = [_divide_into_words(tokenizer, text) for text in (left + right, left, right)]
        if words[0] is None or words[0] != [*(words[1] or []), *(words[2] or [])]:
            return False
    ids = [
        tokenizer.encode(text, add_special_tokens=False).ids for text in (left + right, left, right)
    ]
    return bool(ids[0] == ids[1] + ids[2])


def _divide_into_words(tokenizer: Any, text: str) -> list[str] | None:
    if tokenizer.pre_tokenizer is None:
        return None
    if tokenizer.normalizer is not None:
        text = tokenizer.normalizer.normalize_str(text)
    return [word for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text)]
