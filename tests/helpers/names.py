"""Names for parameters of tests, the same in every process, so that processes can share a suite."""


def named(value: object) -> str:
    """What `ids=` gives a value: the name of a function or class; else its text, without an address in it."""
    name = getattr(value, "__name__", None)
    if name is not None:
        return str(name)
    return type(value).__name__ if " at 0x" in str(value) else str(value)
