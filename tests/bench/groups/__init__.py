"""One module a group of figures; each has `measure() -> Iterator[Figure]`, and is found by being here."""
