"""Does the filter keep the best, do choices flip where they must, and how fast?"""
