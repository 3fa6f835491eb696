"""Speech to text with Whisper: recordings in, transcripts out.

audio            recordings as samples
settings         what is asked for, and which text is decoded again at another temperature
vocabulary       special tokens, languages, tasks
windows          what the encoder reads, and where windows begin and end (with vad)
speech_model     a Whisper model behind all this: states, languages
window_decoder   windows as requests of one run, or by beam search
words            when each word is said
captions         text to copy from, window by window
transcriber      recordings side by side
result           what comes out (with formats)
"""
