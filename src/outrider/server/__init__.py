"""`outrider serve`: OpenAI's API over a live batch. Needs the extra `server`.

app                  the routes (http_server runs them; loading_responder answers until then;
                     middleware: keys, sizes and origins)
protocol             what requests may say (messages, responses_bodies)
request_parsing      from what is said to what the engine is asked (chat_prompts, grammar)
serving              requests become answers, for HTTP and for files (batch_file)
response_builder     outputs as choices, whole or in chunks (message_parser)
engine_client        what a server asks of an engine, wherever that is
engine_loop          one thread that owns the live batch; requests in, outputs out
engine_process       that loop in a process of its own, behind a pipe
engine_factory       a loop over a model, and what is known of that model (model_info)
speculation_methods  what drafts: one engine for each method that a request may name
metrics              what `/metrics` tells
"""
