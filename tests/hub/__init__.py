"""A Hub that tests start themselves: real git objects, LFS storage, faults on demand, and a log of every request.

Unmodified clients talk to it over HTTP: `huggingface_hub`, `hf download`, `hf cache verify`. What it answers follows
what those clients ask (huggingface_hub 1.31 to 2.4, plain LFS; xet is off).

`git` holds a repo's objects, `store` holds everything else and says who may do what, `endpoints` answers requests,
`server` serves them, plays the faults and keeps the log. `fixture` gives tests one server a session, emptied for each.
"""
