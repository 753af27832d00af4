"""The page: `view` turns events into the records it draws, `page` is the Gradio part, `static` its text, style and code."""
