"""What happens around a step: entering the tape, finding blocks, checking options, measuring memory."""
