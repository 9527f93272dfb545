"""What users are shown: tables of what is kept, dropped and recomputed."""
