"""Commands that look: at runs, at programs, at devices and at plans."""
