"""What goes where in which precision, by arithmetic, before any weight is read: `python -m specdemo plan`."""
