"""The requests of the example: questions in one chat template, questions on one text, and chats of their own."""

from __future__ import annotations

from typing import Any, NamedTuple

HOUSE_RULES = (
    "These are the rules of the house at the lake. Breakfast is from seven to ten in the kitchen. Guests who leave "
    "early find bread and fruit in the blue box next to the door. The boat may be used by everybody who can swim; "
    "the key hangs behind the clock. Please be back before sunset, because the boat has no light. Dogs are welcome "
    "in the garden, but not in the bedrooms. On Sunday there is music at the fire place, and quiet begins at "
    "eleven. Answer questions of guests in one short sentence."
)
"""A text that several requests begin with; its pages are computed once."""


class Chat(NamedTuple):
    """A question; the template's own instructions come first if ``system`` is None."""

    question: str
    system: str | None = None


CHATS = (
    Chat("What is the capital of France?"),
    Chat("Until when is breakfast?", HOUSE_RULES),
    Chat("Tell me about the sea.", "You are an old sailor. Tell stories of storms, whales and far islands."),
    Chat("Name the three primary colors."),
    Chat("Which animal says meow?"),
    Chat("How do I make good tea?", "A patient cook explains every recipe in small steps, with amounts and times."),
    Chat("What do bees make?"),
    Chat("Where is the key of the boat?", HOUSE_RULES),
    Chat("Write the numbers from one to ten."),
    Chat("Hi!"),
    Chat("Which planet is closest to the sun?"),
    Chat("Translate into French: good morning."),
    Chat("What is the opposite of hot?"),
    Chat("Give me a short name for a black cat."),
    Chat("May my dog sleep in the bedroom?", HOUSE_RULES),
    Chat("Say yes."),
)
SHORT = 8
"""The number of chats with ``--short``."""


def prompt_tokens(tokenizer: Any, chat: Chat) -> list[int]:
    """Returns a chat in the model's template, up to the assistant's answer."""
    messages = [{"role": "user", "content": chat.question}]
    if chat.system is not None:
        messages.insert(0, {"role": "system", "content": chat.system})
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    tokens: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return tokens
