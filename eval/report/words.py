"""Words that a reader of a report may not know: each in a sentence or two, where the page uses it and at its end."""

GLOSSARY = {
    "PSNR": (
        "Peak signal to noise ratio of two pictures, in dB; more is closer. 6 dB more are half the difference in each "
        "pixel. The two pictures are the quantized and the 16-bit model's, of the same prompt and noise."
    ),
    "LPIPS": (
        "How different two pictures look to a network that was trained on what people see; 0 is the same picture."
    ),
    "noise floor": (
        "What two runs of the 16-bit model itself differ by, with another number of images in a batch and attention "
        "computed in another way. An error of that size is none."
    ),
    "interval": (
        "Where the mean over all prompts of the kind lies, with 95 % confidence. It is a bootstrap interval (BCa: "
        "corrected for bias and skew) that draws prompts anew and keeps the images of a prompt together."
    ),
    "as good as published": (
        "No worse, with the whole interval, than what the best published quantizers of as many bits reach on models "
        "of as many denoising steps. Worse is wholly below that."
    ),
    "Holm": (
        "Holm's correction: the more figures are held against a margin on one page, the more certain each has to be, "
        "so that one wrong word among all of them stays as rare as 5 %. It changes verdicts and no interval."
    ),
    "as int8": (
        "The same file, computed otherwise. fluxq.prepare turns codes that a chip cannot multiply into 8-bit ones "
        "when it loads them: usually closer to 16 bit than the file's own codes, and larger in memory."
    ),
    "bits per weight": (
        "All that is stored for all Linears of the quantized components, those in 16 bit among them, over the number "
        "of their weights."
    ),
    "dominated": "Another run is at least as close to 16 bit and takes no more.",
    "paired bootstrap": (
        "p is how often chance alone would make two runs differ as much on the same images; p, Holm is that, "
        "corrected for the number of comparisons."
    ),
    "SQNR": "Signal to quantization noise ratio, in dB: the energy of what should come out over that of the error.",
    "velocity error": (
        "Error of the transformer at one denoising step, as a share of what it gives out, with the 16-bit model's "
        "input."
    ),
    "damage": (
        "Share of the final error that a layer makes when it alone is quantized. All shares add up to about 1; far "
        "from it, errors cancel or feed on one another."
    ),
    "FID": (
        "Distance between two sets of pictures as a whole. It cannot rank quantizers: its bias by the number of "
        "images is larger than their differences."
    ),
    "IQR": "Range of the middle half of the times that were taken; p50 is the middle one, p95 is exceeded by 5 %.",
}
