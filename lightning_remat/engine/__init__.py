"""The tape: what each op was given and made, and how to make it again. Knows nothing of Lightning."""
