"""A reward with variance for any model: the share of digits in the answer."""


def digit_share(prompts, completions, **columns):
    return [sum(c.isdigit() for c in text) / max(len(text), 1) for text in completions]
