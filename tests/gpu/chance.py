"""A reward for random weights, whose texts earn nothing: equal rewards teach nothing."""

from zlib import crc32


def chance(sample):
    """A hash of the text."""
    return crc32(sample.response.encode()) / 2**32
