"""How an invented question begins: a few seed words, spread over kinds of request, subjects and languages.

The target finishes the question itself, so only its first words are ours. They steer the spread: without them a small
model asks the same dozen questions.
"""

from __future__ import annotations

import random

_KINDS: dict[str, tuple[str, ...]] = {
    "chat": (
        "What is",
        "Why do",
        "How does",
        "Explain",
        "Can you tell me",
        "What are the benefits of",
        "What is the difference between",
        "How can I",
        "Who",
        "When did",
        "Describe",
        "Is it true that",
        "I want to learn about",
    ),
    "code": (
        "Write a Python function that",
        "Write a Python class",
        "Write a JavaScript function that",
        "Write an SQL query that",
        "Write a shell command that",
        "Explain this code:\n\n",
        "Fix the bug in this function:\n\ndef",
        "Write a C program that",
        "How do I use a dictionary in",
        "Write HTML and CSS for",
        "Write unit tests for",
    ),
    "summary": (
        "Summarize the following text:\n\n",
        "Summarize this paragraph in one sentence:\n\n",
        "Give the main points of this article:\n\n",
        "Answer the question using only this text.\n\nText:",
        "What does the following note say?\n\n",
    ),
    "list": (
        "List five",
        "List three",
        "Give me ten",
        "Name some",
        "Make a checklist for",
        "Write the steps to",
        "Give examples of",
        "What are the main",
    ),
    "edit": (
        "Correct the grammar:\n\n",
        "Rewrite this sentence to be more formal:\n\n",
        "Make this text shorter:\n\n",
        "Change the tense of this text:\n\n",
        "Turn these notes into an email:\n\n",
        "Replace the word",
        "Copy this list in alphabetical order:\n\n",
        "Fix the spelling in this text:\n\n",
    ),
    "write": (
        "Write a short story about",
        "Write a poem about",
        "Write a letter to",
        "Write a product description of",
        "Write a dialogue between",
        "Write an email to",
        "Invent a name for",
        "Write an introduction to",
    ),
    "sums": ("Solve:", "What is the sum of", "A shop sells", "If a train", "Convert", "Calculate", "How many"),
    "languages": (
        "Expliquez",
        "Écrivez une phrase sur",
        "Qu'est-ce que",
        "Erkläre",
        "Schreibe einen Satz über",
        "Was ist",
        "Explica",
        "Escribe una lista de",
        "¿Qué es",
        "Spiega",
        "Cos'è",
        "O que é",
        "Wat is",
        "解释",
        "写一个",
        "Translate into French:",
        "Translate into Spanish:",
        "Translate to German:",
    ),
}

_SUBJECTS = (
    "the weather",
    "a garden",
    "history",
    "the human body",
    "money",
    "travel",
    "music",
    "a small business",
    "school",
    "space",
    "cooking",
    "sports",
    "computers",
    "animals",
    "health",
    "rivers",
    "a city",
    "work",
    "friendship",
    "the law",
    "energy",
    "a museum",
    "physics",
    "biology",
    "chemistry",
    "books",
    "families",
    "cars",
    "the sea",
    "maps",
    "numbers",
    "strings",
    "files",
    "lists",
    "dates",
)

_TAKES_SUBJECT = ("about", "of", "for", "with", "on", "to", "sur", "über", "Explain", "Describe", "is", "do", "does")


def seed_words(number: int, seed: int) -> str:
    """The first words of question `number`: kinds in turn, the rest by chance; the same for the same arguments."""
    chance = random.Random(f"{seed}:{number}")
    kinds = list(_KINDS.values())
    words = chance.choice(kinds[number % len(kinds)])
    if words.split()[-1] in _TAKES_SUBJECT and chance.random() < 0.5:
        words = f"{words} {chance.choice(_SUBJECTS)}"
    return words
