"""Text classification: what a message is about, from words hashed into buckets, at epsilon 4."""

# %% Made-up messages. Yours may be any table with one column that says who wrote each.
import tempfile
import zlib

import numpy as np
import pyarrow as pa
from torch import nn

import clipline as cl

ABOUT = {
    "travel": ["train", "flight", "hotel", "ticket", "airport", "map", "beach", "visa"],
    "food": ["bread", "soup", "cook", "dinner", "recipe", "lunch", "oven", "cheese"],
    "money": ["bank", "price", "loan", "rent", "salary", "tax", "budget", "cash"],
}
BUCKETS, TOPICS, rng = 512, list(ABOUT), np.random.default_rng(0)


def written(topic):  # words that say nothing, two that tell, and one of any topic
    other = ABOUT[TOPICS[rng.integers(3)]]
    return " ".join([*map(str, rng.integers(0, 300, 8)), *rng.choice(ABOUT[topic], 2), rng.choice(other)])


topics = rng.choice(TOPICS, 8000)
posts = pa.table({"writer": rng.integers(0, 1500, 8000), "message": [*map(written, topics)], "topic": topics})


# %% Words go to buckets by a hash. A vocabulary of what users wrote would tell of them.
def hashed(messages):
    found = np.zeros((len(messages), BUCKETS), np.float32)
    for row, text in enumerate(messages):
        found[row, [zlib.crc32(word.encode()) % BUCKETS for word in text.split()]] = 1
    return found


people = cl.Population.from_dataframe(posts, user="writer", text=hashed, categories={"topic": TOPICS})
train, test = people.split(test=0.1, seed=0)


# %% A linear model: the fewer parameters, the less noise in all.
def loss(model, batch):
    return nn.functional.cross_entropy(model(batch["message"]), batch["topic"], reduction="none")


def accuracy(model, batch):
    return model(batch["message"]).argmax(dim=1) == batch["topic"]


privacy, local = cl.Privacy(epsilon=4.0, population_size=1_350), cl.LocalSGD(lr=2.0)
training = cl.Training(nn.Linear(BUCKETS, 3), loss, train, rounds=40, cohort_size=150, local=local, privacy=privacy)
result = training.run([cl.Evaluate(test, accuracy, every=20)])

# %% Save, load, predict.
saved = cl.load(result.save(tempfile.mkdtemp()), model=nn.Linear(BUCKETS, 3))
print("on trains:", TOPICS[saved.predict({"message": hashed(["my train ticket and the hotel"])})[0].argmax()])
print("accuracy", round(result.metrics["accuracy"], 3), "by guessing: 0.333")
print(saved.guarantee)
