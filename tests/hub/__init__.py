"""A Hub that tests start themselves: real git objects, LFS and xet storage, faults on demand, a log of every request.

Unmodified clients talk to it over HTTP: `huggingface_hub`, `hf download`, `hf cache verify`. README.md says what it
holds, what it is checked against, and what a push was put through with it.
"""
