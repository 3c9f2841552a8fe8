"""The engine from Python: a second turn that reuses the KV blocks of the first."""

from engine import LLM, SamplingParams


def main() -> None:
    llm = LLM("default")
    params = SamplingParams(temperature=0.2, top_p=0.9, repetition_penalty=1.1, max_tokens=80)
    messages = []
    for question in ("Which planet is the largest, and what is it made of?", "And which one is the smallest?"):
        messages.append({"role": "user", "content": question})
        turn = llm.chat(messages, params)
        print(f"> {question}\n{turn.text}")
        print(f"[{turn.num_prompt_tokens} prompt tokens, {turn.num_cached_tokens} of them from the cache]\n")
        # The reply goes back with its token ids: encoding the text anew could give others, which would miss the cache.
        messages.append({"role": "assistant", "content": turn.text, "token_ids": turn.token_ids})
    llm.exit()


if __name__ == "__main__":
    main()
