"""The page: `view` turns events into what is drawn, `page` is the Gradio part, `static` holds text, style and code."""
