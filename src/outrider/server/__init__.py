"""`outrider serve`: OpenAI's API over a live batch. Needs the extra `server`.

lanes    what drafts: one engine for each method that a request may name
loop     one thread that owns the live batch; orders in, events out
apart    that loop in a process of its own, behind a pipe
decoding a loop over a model, and what is known of that model where bodies are read
bodies   what requests may say
orders   from what is said to what the engine is asked
grammar  answers that follow a JSON schema, a regular expression or a grammar
answers  events as choices, whole or in chunks
desk     what reads bodies and writes answers, for HTTP and for files
counts   what `/metrics` tells
guard    keys, sizes and origins
app      the routes
"""
