"""Images that experiments learn to draw, and how good the drawn ones are."""
