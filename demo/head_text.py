"""Text for training a draft head: what a chat model answers to made-up prompts and to follow-ups on its answers."""

import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from random import Random

import msgspec
from rich.console import Console

from demo.corpus.scene import is_held_out_text
from engine.llm import LLM
from wire.sampling import SamplingParams

MAX_RUNNING, CONTEXT_TOKENS, ANSWER_TOKENS = 64, 768, 256
PROMPTS_AT_ONCE = 256
FOLLOW_UP_SHARE = 0.3
TEMPERATURES = (0.0, 0.8, 0.0, 1.0)  # of one group of prompts after the other


def _items(text: str) -> tuple[str, ...]:
    """Those between semicolons. Line breaks are blanks."""
    return tuple(" ".join(item.split()) for item in text.split(";"))


TOPICS = _items("""
    photosynthesis; black holes; the water cycle; volcanoes; the French Revolution; the Roman Empire; honey bees; chess;
    jazz music; climate change; inflation; compound interest; vaccines; the immune system; the human heart; sleep;
    meditation; running a marathon; baking bread; coffee; green tea; chocolate; vegetable gardening; houseplants;
    recycling; electric cars; bicycles; high-speed trains; airplanes; rockets; the Moon; Mars; the Solar System;
    galaxies; gravity; electricity; magnets; lasers; batteries; solar panels; wind turbines; nuclear power; oil and gas;
    glaciers; deserts; rainforests; coral reefs; whales; octopuses; wolves; cats; dogs; horses; owls; butterflies;
    spiders; dinosaurs; fossils; DNA; evolution; probability; prime numbers; fractions; algebra; geometry; the
    Pythagorean theorem; statistics; logic; machine learning; neural networks; databases; operating systems; the
    Internet; encryption; passwords; open source software; video games; smartphones; robots; 3D printing; cloud
    computing; computer viruses; social media; photography; painting; sculpture; opera; ballet; poetry; novels;
    Shakespeare; Greek mythology; Buddhism; philosophy; ethics; democracy; elections; taxes; the stock market; starting
    a business; marketing; job interviews; time management; public speaking; teamwork; friendship; parenting; weddings;
    travel on a small budget; Paris; Tokyo; New York; Egypt; Brazil; India; mountain climbing; swimming; football;
    basketball; tennis; yoga; healthy eating; vitamins; stress; first aid; the weather; earthquakes; bridges; castles;
    pyramids; museums; libraries; the printing press; money; languages; maps; clocks; the sea
""")

QUESTIONS = _items("""
    What is {}?; Explain {} in simple words.; Explain {} to a child of ten.; Why does {} matter?; Tell me about {}.;
    What should a beginner know about {}?; What are the advantages and disadvantages of {}?; Give me five facts about
    {}.; List ten words that have to do with {}.; What are three common mistakes about {}?; How has {} changed over
    time?; Write a short story about {}.; Write a poem about {}.; Write a paragraph about {} for a school essay.; Write
    an introduction to a talk about {}.; Write a letter to a friend about {}.; Write a short dialogue about {}.; Write a
    product description for a book about {}.; Make a quiz of three questions about {}, with answers.; Give step-by-step
    advice to someone who wants to learn about {}.; Compare {} and {}.; What do {} and {} have in common?; Summarize in
    one sentence what people should know about {}.; Suggest three titles for an article about {}.; Continue this text:
    The first time that I heard about {}, I; Continue this story: Once there was a girl who loved {}.; Write a JSON
    object that describes {}.; Write a table in Markdown about {}.; Is {} dangerous? Give reasons.; Translate into
    French: I would like to learn more about {}.; Translate into Spanish: My brother talks about {} every day.; Rewrite
    this more politely: Stop talking about {}, it is boring.; Write an email that invites people to a course on {}.;
    Correct the grammar: He do not know nothing about {} but he want learn.; Who should I ask about {}?; What would
    happen if there were no more {}?; Write a headline and a news report about {}.
""")

TASKS = _items("""
    reverses a string; computes the factorial of a number; checks whether a number is prime; sorts a list of numbers;
    counts the words in a text; finds the largest number of a list; removes duplicates from a list; reads a CSV file;
    computes the Fibonacci numbers; checks whether a word is a palindrome; merges two sorted lists; adds two matrices;
    converts Celsius to Fahrenheit; counts the vowels in a string; finds an element by binary search; makes a random
    password; groups words by their first letter; computes the mean and the median; writes a dictionary to a JSON file;
    parses a date; downloads a web page; computes the greatest common divisor; flattens a nested list; checks an email
    address; implements a stack; implements a queue; traverses a binary tree; prints a multiplication table
""")

CODING = _items("""
    Write a Python function that {}.; Write a JavaScript function that {}.; Write a program in C that {}.; Write a
    Python class that {}.; Explain how a program that {} works.; Write a test for a Python function that {}.; Write a
    Java method that {}, with comments.; Give me pseudocode of an algorithm that {}.
""")

FOLLOW_UPS = _items("""
    Make it shorter.; Summarize that in two sentences.; Tell me more.; Can you give an example?; Why?; Explain that in
    other words.; Rewrite it as a list.; Are you sure?; Translate your answer into French.; Thank you!; What is the most
    important point?; Continue.; Write it in a more formal style.; Ask me a question about it.
""")


class Message(msgspec.Struct):
    """As chat templates take it."""

    role: str
    content: str


class Text(msgspec.Struct):
    """A prompt and the model's answer, whose last token is that which ends it if the answer is complete."""

    tokens: list[int]
    num_prompt: int
    temperature: float
    is_held_out: bool  # never trained on


def first_prompts(rng: Random) -> Iterator[str]:
    """Endless. There are some thousands of different ones."""
    while True:
        forms, subjects = (CODING, TASKS) if rng.random() < 0.15 else (QUESTIONS, TOPICS)
        form = rng.choice(forms)
        yield form.format(*rng.sample(subjects, form.count("{}")))


def write_text(model: str, seconds: float, seed: int, path: Path, console: Console) -> None:
    """Generate for so long, and save after each group of prompts. The file is a JSON list of `Text`."""
    llm = LLM(model, max_running=MAX_RUNNING, context_tokens=CONTEXT_TOKENS)
    rng = Random(seed)
    prompts = first_prompts(rng)
    texts: list[Text] = []
    answered: list[list[Message]] = []
    start = time.monotonic()
    for group in count():
        temperature = TEMPERATURES[group % len(TEMPERATURES)]
        dialogues = [[*rng.choice(answered), _follow_up(rng)] for _ in answered if rng.random() < FOLLOW_UP_SHARE]
        dialogues += [[Message("user", next(prompts))] for _ in range(PROMPTS_AT_ONCE - len(dialogues))]
        asked = [(dialogue, ids) for dialogue in dialogues if len(ids := _encode(llm, dialogue)) <= _MAX_PROMPT]
        sampling = SamplingParams(temperature=temperature, seed=rng.getrandbits(32))
        answers = llm.generate_ids([ids for _, ids in asked], sampling, ANSWER_TOKENS)
        answered = []
        for (dialogue, ids), answer in zip(asked, answers, strict=True):
            texts.append(Text([*ids, *answer], len(ids), temperature, is_held_out_text(dialogue[0].content)))
            said = str(llm.tokenizer.decode(answer, skip_special_tokens=True))
            answered.append([*dialogue, Message("assistant", said)])
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(msgspec.json.encode(texts))
        elapsed, num_tokens = time.monotonic() - start, sum(len(text.tokens) - text.num_prompt for text in texts)
        console.print(f"text: {len(texts)} answers, {num_tokens} tokens, {num_tokens / elapsed:.0f} tokens/s")
        if elapsed >= seconds:
            return


def read_text(path: Path) -> list[Text]:
    """ValueError if the file is another."""
    return msgspec.json.decode(path.read_bytes(), type=list[Text])


_MAX_PROMPT = CONTEXT_TOKENS - ANSWER_TOKENS


def _follow_up(rng: Random) -> Message:
    return Message("user", rng.choice(FOLLOW_UPS))


def _encode(llm: LLM, dialogue: list[Message]) -> list[int]:
    messages = [msgspec.structs.asdict(message) for message in dialogue]
    text = llm.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return list(llm.tokenizer.encode(text, add_special_tokens=False))
